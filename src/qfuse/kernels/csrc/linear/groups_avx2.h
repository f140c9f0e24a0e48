// Blocks of groupwise 4-bit weights with AVX2: `vpmaddubsw` is exact here, since two products of
// 15 by 128 are far below the 16-bit limits, and eight such sums still fit.
#pragma once

#include <immintrin.h>

#include "linear/groups.h"

namespace {

constexpr int kGroupRows = 4;
constexpr int kGroupVectors = 2;  // at a time, of the eight of a block
constexpr int64_t kWideEvery = 4;  // pairs of groups of four k that are summed in 16 bits

// Adds eight k of 4-bit values, times signed bytes, to 16-bit sums.
template <int Rows>
QFUSE_INLINE void multiply_codes(const uint8_t* a, int64_t lda, const uint8_t* b, __m256i* sums) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i both[kGroupVectors], w[kGroupVectors];
  const auto multiply = [&](const uint8_t* from) QFUSE_LAMBDA {
    Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
      int word;
      __builtin_memcpy(&word, from + R * lda, sizeof(word));
      const __m256i x = _mm256_set1_epi32(word);
      Unrolled<kGroupVectors>::run([&]<int V>() QFUSE_LAMBDA {
        __m256i& sum = sums[R * kGroupVectors + V];
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[V], x));
      });
    });
  };
  Unrolled<kGroupVectors>::run([&]<int V>() QFUSE_LAMBDA {
    both[V] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 32 * V));
    w[V] = _mm256_and_si256(both[V], mask);
  });
  multiply(a);
  Unrolled<kGroupVectors>::run([&]<int V>() QFUSE_LAMBDA {
    w[V] = _mm256_and_si256(_mm256_srli_epi16(both[V], 4), mask);
  });
  multiply(a + qfuse::kGroup);
}

template <int Rows, class Has>
void multiply_group(const qfuse::GroupTile& t, int64_t group, int64_t vector, float* totals) {
  constexpr int kTotals = Rows * kGroupVectors;
  const __m256i ones = _mm256_set1_epi16(1);
  const int64_t pairs = t.depth / 2;
  const uint8_t* a = t.a + group * t.depth * qfuse::kGroup;
  const uint8_t* b = t.b + group * pairs * qfuse::kBlock * qfuse::kGroup + vector * 32;
  Words total[kTotals];
  Unrolled<kTotals>::run([&]<int I>() QFUSE_LAMBDA {
    total[I] = start_of<Has>(t.groups, group, I / kGroupVectors);
  });
  for (int64_t done = 0; done < pairs; done += kWideEvery) {
    __m256i sums[kTotals];
    Unrolled<kTotals>::run([&]<int I>() QFUSE_LAMBDA { sums[I] = _mm256_setzero_si256(); });
    const int64_t count = pairs - done < kWideEvery ? pairs - done : kWideEvery;
    for (int64_t p = 0; p < count; ++p) {
      multiply_codes<Rows>(a, t.lda, b, sums);
      a += 2 * qfuse::kGroup;
      b += qfuse::kBlock * qfuse::kGroup;
    }
    Unrolled<kTotals>::run([&]<int I>() QFUSE_LAMBDA {
      total[I] += bits<Words>(_mm256_madd_epi16(sums[I], ones));
    });
  }
  add_shares<Rows, kGroupVectors, Has>(t.groups, group, vector, total, totals);
}

// Whole blocks, although fewer columns may be needed: the padding is zero. A group of all columns
// is contiguous in memory, so groups are the outer loop.
void multiply_group_tile(const qfuse::GroupTile& t, float* totals) {
  with_tile<kGroupRows>(t, [&]<int Rows, class Has>() {
    for (int64_t group = 0; group < t.groups.count; ++group) {
      for (int64_t v = 0; v < kColumnVectors; v += kGroupVectors) {
        multiply_group<Rows, Has>(t, group, v, totals);
      }
    }
  });
}

constexpr qfuse::GroupKernels group_kernels{&unpack, &add_group, &multiply_group_tile, nullptr};

}  // namespace
