// The tile registers of AMX: eight of up to 16 rows of 64 bytes.
//
// In assembly, since GCC's intrinsics do not say which memory they read and write: it moves, or
// leaves out, the stores before them. Each function is an instruction.
#pragma once

#include <cstdint>

#include "isa/vec.h"

namespace {

constexpr int kTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row

// How many rows each register has, in the layout that the processor loads.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Clears all registers.
QFUSE_INLINE void load_shapes(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}

QFUSE_INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int T>
QFUSE_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
QFUSE_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
QFUSE_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

// Each adds a product of A and B to C: C[m][n] += sum over k of A[m][k] * B[k / 4][n][k % 4], with
// int32 sums.
struct UnsignedDot {
  template <int C, int A, int B>
  static QFUSE_INLINE void add() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

struct SignedDot {
  template <int C, int A, int B>
  static QFUSE_INLINE void add() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

// The same with pairs of bfloat16 instead of four bytes, and float32 sums.
struct RealDot {
  template <int C, int A, int B>
  static QFUSE_INLINE void add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

}  // namespace
