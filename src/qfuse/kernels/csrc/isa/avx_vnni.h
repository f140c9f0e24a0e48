// Tiles of integer products with the 256-bit `vpdpbusd` of AVX-VNNI, for the file that defines
// QFUSE_DOT: the instruction with its encoding. VEX is that of AVX-VNNI. EVEX is that of
// AVX512-VNNI: the same kernels with the same registers, which run on processors that have only
// that one.
//
// Rows of 16 columns of a slice of K at a time, so that the weights stay in the L1 cache.
#pragma once

#include <immintrin.h>

#include "isa/vec.h"
#include "linear/groups_avx_vnni.h"

namespace {

constexpr int kRows = 6;
constexpr int kVectors = 2;
constexpr int64_t kSlice = 64;     // groups of four k
constexpr int64_t kMostRows = 24;  // of a tile
// Distance of copied rows: the padding keeps them in different sets of the cache.
constexpr int64_t kLd = kSlice * qfuse::kGroup + 64;

// Copies groups of a row as unsigned bytes.
QFUSE_INLINE void copy_row(const uint8_t* from, int64_t groups, uint32_t flip, uint8_t* to) {
  constexpr int64_t kAtOnce = 8;
  int64_t g = 0;
  Words x;
  for (; g + kAtOnce <= groups; g += kAtOnce) {
    __builtin_memcpy(&x, from + g * qfuse::kGroup, sizeof(x));
    x ^= flip;
    __builtin_memcpy(to + g * qfuse::kGroup, &x, sizeof(x));
  }
  for (; g < groups; ++g) {
    uint32_t word;
    __builtin_memcpy(&word, from + g * qfuse::kGroup, sizeof(word));
    word ^= flip;
    __builtin_memcpy(to + g * qfuse::kGroup, &word, sizeof(word));
  }
}

// Adds the products of some groups to sums, or overwrites them unless there is `more` in them. The
// first rows of a tile also fetch the part of the next slice that `next` points to.
template <int Rows, int Vectors, bool First>
__attribute__((noinline)) void multiply_tile(const uint8_t* a, const int8_t* b, int64_t groups,
                                             const int8_t* next, bool more, int32_t* sums) {
  constexpr int kLines = Vectors / 2;  // of 64 bytes
  Words total[Rows * Vectors];
  const auto at = [&](int i) QFUSE_LAMBDA {
    return sums + i / Vectors * qfuse::kBlock + i % Vectors * kLanes;
  };
  Unrolled<Rows * Vectors>::run(
      [&]<int I>() QFUSE_LAMBDA { total[I] = more ? load<Words>(at(I), kLanes) : Words{}; });
  for (int64_t g = 0; g < groups; ++g) {
    if constexpr (First) {
      Unrolled<kLines>::run(
          [&]<int I>() QFUSE_LAMBDA { _mm_prefetch(next + 64 * I, _MM_HINT_T0); });
      next += 64 * kLines;
    }
    // All at once only if there are registers for them.
    constexpr int kAtOnce = Rows == 1 ? 1 : Vectors;
    Unrolled<Vectors / kAtOnce>::run([&]<int J>() QFUSE_LAMBDA {
      Words w[kAtOnce];
      Unrolled<kAtOnce>::run([&]<int V>() QFUSE_LAMBDA {
        __builtin_memcpy(&w[V], b + 4 * kLanes * (J * kAtOnce + V), sizeof(w[V]));
      });
      Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
        const Words x = broadcast_word(a + R * kLd);
        Unrolled<kAtOnce>::run([&]<int V>() QFUSE_LAMBDA {
          dot(total[R * Vectors + J * kAtOnce + V], x, w[V]);
        });
      });
    });
    a += qfuse::kGroup;
    b += qfuse::kBlock * qfuse::kGroup;
  }
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA { store(at(I), total[I], kLanes); });
}

// All columns of some rows, Vectors at a time.
template <int Rows, int Vectors, bool First>
void multiply_columns(const uint8_t* a, const int8_t* b, int64_t groups, int64_t columns, bool more,
                      int32_t* sums) {
  const int8_t* next = b + kSlice * qfuse::kBlock * qfuse::kGroup;
  for (int64_t c = 0; c < columns; c += Vectors * kLanes) {
    multiply_tile<Rows, Vectors, First>(a, b + c * qfuse::kGroup, groups,
                                        next + c * qfuse::kGroup * kSlice, more, sums + c);
  }
}

template <int Rows>
void multiply_rows(int64_t rows, const uint8_t* a, const int8_t* b, int64_t groups, int64_t columns,
                   bool more, bool first, int32_t* sums) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_rows<Rows - 1>(rows, a, b, groups, columns, more, first, sums);
  }
  constexpr int kWide = Rows == 1 ? 8 : Rows == 2 ? 4 : kVectors;
  if (first) return multiply_columns<Rows, kWide, true>(a, b, groups, columns, more, sums);
  multiply_columns<Rows, kWide, false>(a, b, groups, columns, more, sums);
}

void multiply(const qfuse::Tile& t, int32_t* sums) {
  alignas(64) uint8_t a[kMostRows * kLd];
  int64_t g = 0;
  do {
    const int64_t groups = t.groups - g < kSlice ? t.groups - g : kSlice;
    for (int64_t i = 0; i < t.rows; ++i) {
      copy_row(t.a + i * t.lda + g * qfuse::kGroup, groups, t.flip, a + i * kLd);
    }
    const int8_t* b = t.b + g * qfuse::kBlock * qfuse::kGroup;
    for (int64_t i = 0; i < t.rows; i += kRows) {
      multiply_rows<kRows>(t.rows - i, a + i * kLd, b, groups, t.columns, g > 0,
                           i == 0, sums + i * qfuse::kBlock);
    }
    g += kSlice;
  } while (g < t.groups);
}

// Strips of about equal height.
int64_t tile_rows(int64_t rows) {
  if (rows <= qfuse::kStreamRows) return qfuse::kStreamRows;
  const int64_t strips = (rows + kMostRows - 1) / kMostRows;
  const int64_t even = (rows + strips - 1) / strips;
  return (even + kRows - 1) / kRows * kRows;
}

// Everything but the products of bytes is that of AVX2.
qfuse::Path path_with_dots(const qfuse::Path& avx2) {
  qfuse::Path path = avx2;
  path.name = "avx_vnni";
  path.tile_rows = &tile_rows;
  path.multiply = &multiply;
  path.groups = &group_kernels;
  return path;
}

}  // namespace
