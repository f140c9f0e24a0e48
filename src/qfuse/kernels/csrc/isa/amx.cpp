// The kernels of AMX.
#if defined(__x86_64__)
#include <immintrin.h>

#include "isa/tiles.h"
#include "isa/amx.h"

QFUSE_PATH_LIBRARY(const qfuse::Path* other) {
  static const qfuse::Path path = path_with_tiles(*other, "amx");
  return &path;
}
#endif
