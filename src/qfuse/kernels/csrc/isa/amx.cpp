// The kernels of AMX.
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("amx-tile,amx-int8,amx-bf16"))), apply_to = function)
#endif
#include "isa/tiles.h"
#include "isa/amx.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif

QFUSE_PATH_LIBRARY(const qfuse::Path* other) {
  static const qfuse::Path path = path_with_tiles(*other, "amx");
  return &path;
}
#endif
