// The kernels of AVX-VNNI in the encoding of AVX-VNNI.
//
// Compiled for AVX2: the instruction is written in assembly, since compilers older than it lack
// the flag. Clang looks at the target of the function that it is in.
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avxvnni"))), apply_to = function)
#endif
#define QFUSE_DOT "%{vex%} vpdpbusd"
#include "isa/avx_vnni.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif

QFUSE_PATH_LIBRARY(const qfuse::Path* base) {
  static const qfuse::Path path = path_with_dots(*base);
  return &path;
}
#endif
