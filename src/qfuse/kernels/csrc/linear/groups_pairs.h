// Blocks of groupwise 4-bit weights with AVX2 or AVX512BW: `vpmaddubsw` is exact here, since two
// products of 15 by 128 are far below the 16-bit limits, and eight such sums still fit.
#pragma once

#include <immintrin.h>

#include "linear/groups.h"

namespace {

constexpr int kGroupRows = 4;
constexpr int kGroupVectors = 2;  // at a time, of those of a block
constexpr int64_t kWideEvery = 4;  // pairs of groups of four k that are summed in 16 bits

// Sums of two products of unsigned by signed bytes.
QFUSE_INLINE Shorts byte_products(Words codes, Words x) {
#if defined(__AVX512BW__)
  return bits<Shorts>(_mm512_maddubs_epi16(bits<__m512i>(codes), bits<__m512i>(x)));
#else
  return bits<Shorts>(_mm256_maddubs_epi16(bits<__m256i>(codes), bits<__m256i>(x)));
#endif
}

// Sums of two numbers.
QFUSE_INLINE Words pair_sums(Shorts s) {
  const Shorts ones = Shorts{} + static_cast<int16_t>(1);
#if defined(__AVX512BW__)
  return bits<Words>(_mm512_madd_epi16(bits<__m512i>(s), bits<__m512i>(ones)));
#else
  return bits<Words>(_mm256_madd_epi16(bits<__m256i>(s), bits<__m256i>(ones)));
#endif
}

// Adds eight k of 4-bit values, times signed bytes, to 16-bit sums.
template <int Rows>
QFUSE_INLINE void multiply_codes(const uint8_t* a, int64_t lda, const uint8_t* b, Shorts* sums) {
  Words both[kGroupVectors], w[kGroupVectors];
  const auto multiply = [&](const uint8_t* from) QFUSE_LAMBDA {
    Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
      uint32_t word;
      __builtin_memcpy(&word, from + R * lda, sizeof(word));
      const Words x = Words{} + word;
      Unrolled<kGroupVectors>::run([&]<int V>() QFUSE_LAMBDA {
        sums[R * kGroupVectors + V] += byte_products(w[V], x);
      });
    });
  };
  Unrolled<kGroupVectors>::run([&]<int V>() QFUSE_LAMBDA {
    __builtin_memcpy(&both[V], b + 4 * kLanes * V, sizeof(both[V]));
    w[V] = both[V] & 0x0f0f0f0fu;
  });
  multiply(a);
  Unrolled<kGroupVectors>::run(
      [&]<int V>() QFUSE_LAMBDA { w[V] = (both[V] >> 4) & 0x0f0f0f0fu; });
  multiply(a + qfuse::kGroup);
}

template <int Rows, class Has>
void multiply_group(const qfuse::GroupTile& t, int64_t group, int64_t vector, bool fetches,
                    float* totals) {
  constexpr int kTotals = Rows * kGroupVectors;
  const int64_t pairs = t.depth / 2;
  const uint8_t* a = t.a + group * t.depth * qfuse::kGroup;
  const uint8_t* b = t.b + group * pairs * qfuse::kBlock * qfuse::kGroup + vector * 4 * kLanes;
  Words total[kTotals];
  Unrolled<kTotals>::run([&]<int I>() QFUSE_LAMBDA {
    total[I] = start_of<Has>(t.groups, group, I / kGroupVectors);
  });
  for (int64_t done = 0; done < pairs; done += kWideEvery) {
    Shorts sums[kTotals];
    Unrolled<kTotals>::run([&]<int I>() QFUSE_LAMBDA { sums[I] = Shorts{}; });
    const int64_t count = pairs - done < kWideEvery ? pairs - done : kWideEvery;
    for (int64_t p = 0; p < count; ++p) {
      if (fetches) fetch_weights<kGroupVectors * 4 * kLanes>(b);
      multiply_codes<Rows>(a, t.lda, b, sums);
      a += 2 * qfuse::kGroup;
      b += qfuse::kBlock * qfuse::kGroup;
    }
    Unrolled<kTotals>::run([&]<int I>() QFUSE_LAMBDA { total[I] += pair_sums(sums[I]); });
  }
  add_shares<Rows, kGroupVectors, Has>(t.groups, group, vector, total, totals);
}

// Whole blocks, although fewer columns may be needed: the padding is zero. A group of all columns
// is contiguous in memory, so groups are the outer loop.
void multiply_group_tile(const qfuse::GroupTile& t, float* totals) {
  in_tiles<kGroupRows>(t, totals, [&]<int Rows, class Has>(const auto& some, float* to) {
    const bool fetches = some.a == t.a;  // the other rows read the weights from a cache
    for (int64_t group = 0; group < some.groups.count; ++group) {
      if (fetches) fetch_columns<Has>(some.groups, group);
      for (int64_t v = 0; v < kColumnVectors; v += kGroupVectors) {
        multiply_group<Rows, Has>(some, group, v, fetches, to);
      }
    }
  });
}

constexpr qfuse::GroupKernels group_kernels{&unpack, &add_group, &multiply_group_tile, nullptr};

}  // namespace
