// The kernels of AMX with emulated tiles.
#if defined(__x86_64__)
#include <immintrin.h>

#include "isa/tiles_emulated.h"
#include "isa/amx.h"

QFUSE_PATH_LIBRARY(const qfuse::Path* other) {
  static const qfuse::Path path = path_with_tiles(*other, "amx_emulated");
  return &path;
}
#endif
