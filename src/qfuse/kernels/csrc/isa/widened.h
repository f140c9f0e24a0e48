// Tiles of integer products for processors without dot products of bytes: both operands are widened
// to 16 bits, and `vpmaddwd` adds two products exactly (`vpmaddubsw` would saturate). With AVX2 or
// AVX512BW.
//
// Widening costs more than multiplying, so it happens outside of the loop over products: for every
// slice of K, the rows are widened once, and the weights once for all rows of the tile. With few
// rows the weights are read once anyway, as a stream from memory, and are widened in registers.
//
// Bytes 0 and 2 of a group of four are one pair of 16-bit numbers, bytes 1 and 3 the other one: two
// shifts widen a vector of weights.
#pragma once

#include <immintrin.h>

#include "isa/fetch.h"
#include "isa/vec.h"

namespace {

#if defined(__AVX512BW__)
constexpr int kWideRows = 8;
#else
constexpr int kWideRows = 4;
#endif
constexpr int kWideVectors = 2;  // of a tile in registers: 8x32 columns, or 4x16
constexpr int64_t kPanel = kWideVectors * kLanes;
constexpr int64_t kPanels = qfuse::kBlock / kPanel;
// Both operands of a slice together take about 50 KiB, so that they stay in the L2 cache, and what
// the innermost loop reads stays in the L1 cache.
constexpr int64_t kSlice = 64;         // groups of four k
constexpr int64_t kMostWideRows = 32;  // of a tile
// Distance of rows in numbers: the padding keeps them in different sets of the cache.
constexpr int64_t kWideLd = kSlice * qfuse::kGroup + 32;
constexpr int64_t kPanelSize = kSlice * qfuse::kGroup * kPanel;  // numbers

QFUSE_INLINE Words pair_products(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return bits<Words>(_mm512_madd_epi16(bits<__m512i>(a), bits<__m512i>(b)));
#else
  return bits<Words>(_mm256_madd_epi16(bits<__m256i>(a), bits<__m256i>(b)));
#endif
}

template <class From>
QFUSE_INLINE Shorts load_shorts(const From* from) {
  Shorts v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

// A pair of numbers in every lane.
QFUSE_INLINE Shorts broadcast_pair(const int16_t* from) {
  uint32_t pair;
  __builtin_memcpy(&pair, from, sizeof(pair));
#if defined(__AVX512BW__)
  return bits<Shorts>(_mm512_set1_epi32(static_cast<int>(pair)));
#else
  return bits<Shorts>(_mm256_set1_epi32(static_cast<int>(pair)));
#endif
}

// Writes groups of a row: for each one bytes 0, 2, 1 and 3.
QFUSE_INLINE void widen_row(const uint8_t* from, int64_t groups, uint32_t flip, int16_t* to) {
  constexpr int64_t kAtOnce = 4;
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const __m128i flips = _mm_set1_epi32(static_cast<int>(flip));
  const auto widen = [&](__m128i x, int64_t g) QFUSE_LAMBDA {
    x = _mm_shuffle_epi8(_mm_xor_si128(x, flips), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + g * qfuse::kGroup), _mm256_cvtepu8_epi16(x));
  };
  int64_t g = 0;
  for (; g + kAtOnce <= groups; g += kAtOnce) {
    widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + g * qfuse::kGroup)), g);
  }
  if (g < groups) {
    __m128i x = _mm_setzero_si128();
    __builtin_memcpy(&x, from + g * qfuse::kGroup, (groups - g) * qfuse::kGroup);
    widen(x, g);
  }
}

// Writes panels, each of which is [groups][2 pairs][kPanel].
QFUSE_INLINE void widen_block(const int8_t* from, int64_t groups, int16_t* to) {
  for (int64_t g = 0; g < groups; ++g) {
    Unrolled<kPanels * kWideVectors>::run([&]<int I>() QFUSE_LAMBDA {
      const Shorts both = load_shorts(from + 4 * kLanes * I);
      const Shorts even = (both << 8) >> 8;
      const Shorts odd = both >> 8;
      int16_t* panel = to + I / kWideVectors * kPanelSize + I % kWideVectors * 2 * kLanes;
      __builtin_memcpy(panel, &even, sizeof(even));
      __builtin_memcpy(panel + 2 * kPanel, &odd, sizeof(odd));
    });
    from += qfuse::kBlock * qfuse::kGroup;
    to += qfuse::kGroup * kPanel;
  }
}

// The sums of a tile that stays in registers.
template <int Rows, int Vectors>
struct WideSums {
  QFUSE_INLINE WideSums(const int32_t* sums, bool more) {
    Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
      total[I] = more ? load<Words>(sums + offset(I), kLanes) : Words{};
    });
  }

  QFUSE_INLINE void write(int32_t* sums) const {
    Unrolled<Rows * Vectors>::run(
        [&]<int I>() QFUSE_LAMBDA { store(sums + offset(I), total[I], kLanes); });
  }

  static constexpr int64_t offset(int i) { return i / Vectors * qfuse::kBlock + i % Vectors * kLanes; }

  Words total[Rows * Vectors];
};

// Adds the products of some groups to sums, or overwrites them unless there is `more` in them. The
// first rows of a tile also fetch the part of the next slice that `next` points to.
template <int Rows, bool First>
__attribute__((noinline)) void multiply_panel(const int16_t* a, const int16_t* b, int64_t groups,
                                              const int8_t* next, bool more, int32_t* sums) {
  WideSums<Rows, kWideVectors> s(sums, more);
  // One pair of every group at a time: with both, GCC has no registers for the sums.
  for (int64_t i = 0; i < 2 * groups; ++i, a += 2, b += 2 * kPanel) {
    if constexpr (First) _mm_prefetch(next + i * 32, _MM_HINT_T1);
    Shorts w[kWideVectors];
    Unrolled<kWideVectors>::run(
        [&]<int V>() QFUSE_LAMBDA { w[V] = load_shorts(b + 2 * kLanes * V); });
    Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
      const Shorts x = broadcast_pair(a + R * kWideLd);
      Unrolled<kWideVectors>::run([&]<int V>() QFUSE_LAMBDA {
        s.total[R * kWideVectors + V] += pair_products(x, w[V]);
      });
    });
  }
  s.write(sums);
}

template <int Rows, bool First>
void multiply_rows(int64_t rows, const int16_t* a, const int16_t* b, int64_t groups,
                   const int8_t* next, bool more, int32_t* sums) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_rows<Rows - 1, First>(rows, a, b, groups, next, more, sums);
  }
  multiply_panel<Rows, First>(a, b, groups, next, more, sums);
}

// The same with weights that are widened in registers.
template <int Rows, int Vectors, bool First>
__attribute__((noinline)) void multiply_stream(const int16_t* a, const int8_t* b, int64_t groups,
                                               bool more, int32_t* sums) {
  constexpr int kAtOnce = 2;  // vectors
  WideSums<Rows, Vectors> s(sums, more);
  for (int64_t g = 0; g < groups; ++g) {
    if constexpr (First) fetch_weights<qfuse::kBlock * qfuse::kGroup>(b);
    Unrolled<Vectors / kAtOnce>::run([&]<int J>() QFUSE_LAMBDA {
      // Compilers would load all vectors first, and then have no registers for the sums.
      asm volatile("" : : : "memory");
      Shorts even[kAtOnce], odd[kAtOnce];
      Unrolled<kAtOnce>::run([&]<int I>() QFUSE_LAMBDA {
        const Shorts both = load_shorts(b + 4 * kLanes * (J * kAtOnce + I));
        even[I] = (both << 8) >> 8;
        odd[I] = both >> 8;
      });
      Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
        const Shorts x = broadcast_pair(a + R * kWideLd);
        const Shorts y = broadcast_pair(a + R * kWideLd + 2);
        Unrolled<kAtOnce>::run([&]<int I>() QFUSE_LAMBDA {
          Words& total = s.total[R * Vectors + J * kAtOnce + I];
          total += pair_products(x, even[I]);
          total += pair_products(y, odd[I]);
        });
      });
    });
    a += qfuse::kGroup;
    b += qfuse::kBlock * qfuse::kGroup;
  }
  s.write(sums);
}

template <int Rows>
void multiply_few(int64_t rows, const int16_t* a, const int8_t* b, int64_t groups, int64_t columns,
                  bool more, int32_t* sums) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_few<Rows - 1>(rows, a, b, groups, columns, more, sums);
  }
  // As many as have space for their sums; the rest of a slice is then in the L1 cache.
  constexpr int kMost = qfuse::kBlock / kLanes;
  constexpr int kFit = kLanes / Rows / 2 * 2;
  constexpr int kVectors = kFit < kMost ? kFit : kMost;
  multiply_stream<Rows, kVectors, true>(a, b, groups, more, sums);
  for (int64_t c = kVectors * kLanes; c < columns; c += kVectors * kLanes) {
    multiply_stream<Rows, kVectors, false>(a, b + c * qfuse::kGroup, groups, more, sums + c);
  }
}

void multiply_widened(const qfuse::Tile& t, int32_t* sums) {
  alignas(64) int16_t a[kMostWideRows * kWideLd];
  alignas(64) int16_t b[kPanels * kPanelSize];
  int64_t g = 0;
  do {
    const int64_t groups = t.groups - g < kSlice ? t.groups - g : kSlice;
    const int8_t* weight = t.b + g * qfuse::kBlock * qfuse::kGroup;
    for (int64_t i = 0; i < t.rows; ++i) {
      widen_row(t.a + i * t.lda + g * qfuse::kGroup, groups, t.flip, a + i * kWideLd);
    }
    if (t.rows <= qfuse::kStreamRows) {
      multiply_few<qfuse::kStreamRows>(t.rows, a, weight, groups, t.columns, g > 0, sums);
    } else {
      widen_block(weight, groups, b);
      const int8_t* next = weight + kSlice * qfuse::kBlock * qfuse::kGroup;
      for (int64_t c = 0; c < t.columns; c += kPanel, next += kSlice * 64) {
        const int16_t* panel = b + c / kPanel * kPanelSize;
        multiply_rows<kWideRows, true>(t.rows, a, panel, groups, next, g > 0, sums + c);
        for (int64_t i = kWideRows; i < t.rows; i += kWideRows) {
          multiply_rows<kWideRows, false>(t.rows - i, a + i * kWideLd, panel, groups, next, g > 0,
                                          sums + i * qfuse::kBlock + c);
        }
      }
    }
    g += kSlice;
  } while (g < t.groups);
}

// Strips of about equal height.
int64_t widened_tile_rows(int64_t rows) {
  if (rows <= qfuse::kStreamRows) return qfuse::kStreamRows;
  const int64_t strips = (rows + kMostWideRows - 1) / kMostWideRows;
  const int64_t even = (rows + strips - 1) / strips;
  return (even + kWideRows - 1) / kWideRows * kWideRows;
}

}  // namespace
