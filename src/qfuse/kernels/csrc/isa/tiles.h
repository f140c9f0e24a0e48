// The instructions of AMX, each as a function.
//
// In bytes, since assemblers before binutils 2.36 lack their names (Intel SDM, volume 2, has the
// encodings), and not as intrinsics: those of GCC 12 do not say which memory they read, so it moves,
// or leaves out, the stores before them. Addresses are in rax, distances of rows in rdx.
#pragma once

#include <cstdint>

#include "isa/tile_shapes.h"
#include "isa/vec.h"

namespace {

// Clears all registers.
QFUSE_INLINE void load_shapes(const TileShapes& shapes) {
  asm volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x00" ::"a"(&shapes) : "memory");
}

QFUSE_INLINE void release_tiles() {
  asm volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0" ::: "memory");
}

template <int T>
QFUSE_INLINE void clear_tile() {
  asm volatile(".byte 0xc4, 0xe2, 0x7b, 0x49, %c0" ::"i"(0xc0 | T << 3));
}

template <int T>
QFUSE_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile(".byte 0xc4, 0xe2, 0x7b, 0x4b, %c2, 0x10" ::"a"(from), "d"(stride), "i"(4 | T << 3)
               : "memory");
}

template <int T>
QFUSE_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile(".byte 0xc4, 0xe2, 0x7a, 0x4b, %c2, 0x10" ::"a"(to), "d"(stride), "i"(4 | T << 3)
               : "memory");
}

template <int Prefix, int Opcode, int C, int A, int B>
QFUSE_INLINE void add_product() {
  asm volatile(".byte 0xc4, 0xe2, %c0, %c1, %c2" ::"i"((~B & 15) << 3 | Prefix), "i"(Opcode),
               "i"(0xc0 | C << 3 | A));
}

// Each adds a product of A and B to C: C[m][n] += sum over k of A[m][k] * B[k / 4][n][k % 4], with
// int32 sums.
struct UnsignedDot {  // tdpbusd
  template <int C, int A, int B>
  static QFUSE_INLINE void add() {
    add_product<1, 0x5e, C, A, B>();
  }
};

struct SignedDot {  // tdpbssd
  template <int C, int A, int B>
  static QFUSE_INLINE void add() {
    add_product<3, 0x5e, C, A, B>();
  }
};

// The same with pairs of bfloat16 instead of four bytes, and float32 sums: those of even and of odd
// k for themselves, which are added to C. Subnormal values are zero.
struct RealDot {  // tdpbf16ps
  template <int C, int A, int B>
  static QFUSE_INLINE void add() {
    add_product<2, 0x5c, C, A, B>();
  }
};

}  // namespace
