// Blocks of 4-bit weights times one row of digits with `vpdpbusd`: the codes are the unsigned operand
// as they lie in memory, half a byte at a time.
#pragma once

#include <immintrin.h>

#include "digits/digits_avx512.h"
#include "digits/segments.h"
#include "quantized/codes.h"

namespace {

// Adds the products of some words of eight k to [Digits][64] sums.
template <int Digits>
QFUSE_INLINE void add_words(const uint8_t* w, const int8_t* x, int64_t words, __m512i* total) {
  __m512i low = _mm512_set1_epi8(15);
  asm("" : "+v"(low));  // one register, not one for each use
  for (int64_t i = 0; i < words; ++i, w += qfuse::kBlock * 4, x += 2 * qfuse::kDigitBytes) {
    fetch_weights<64 * kDigitVectors>(w);
    __m512i word[kDigitVectors];
    Unrolled<kDigitVectors>::run([&]<int V>() QFUSE_LAMBDA {
      word[V] = _mm512_loadu_si512(w + 64 * V);
    });
    Unrolled<2>::run([&]<int H>() QFUSE_LAMBDA {
      __m512i codes[kDigitVectors];
      Unrolled<kDigitVectors>::run([&]<int V>() QFUSE_LAMBDA {
        codes[V] = _mm512_and_si512(H ? _mm512_srli_epi32(word[V], 4) : word[V], low);
      });
      Unrolled<Digits>::run([&]<int D>() QFUSE_LAMBDA {
        const int8_t* digits = x + H * qfuse::kDigitBytes + D * qfuse::kGroup;
        Unrolled<kDigitVectors>::run([&]<int V>() QFUSE_LAMBDA {
          digit_dot(total[D * kDigitVectors + V], codes[V], digits);
        });
      });
    });
  }
}

// Zero points of a group, as integers.
template <bool Zero>
QFUSE_INLINE Ints zero_points(const qfuse::RealBlock& b, int64_t group, int v) {
  if constexpr (!Zero) return Ints{} + kMiddle<4>;
  return zero_codes_at<4>(b.zero + group * qfuse::kBlock + v * kLanes);
}

// Adds the products of the rests before input feature `end`.
template <bool Zero>
QFUSE_INLINE void add_four_bit_rests(const qfuse::RealBlock& b, const qfuse::DigitRow& row,
                                     int64_t group, int64_t end, int64_t& from, Floats* sums) {
  for (; from < row.rests && row.rest[from].k < end; ++from) {
    const qfuse::Rest rest = row.rest[from];
    const uint8_t* codes = b.codes + rest.k / 8 * qfuse::kBlock * 4;
    const auto shift = static_cast<uint32_t>(rest.k % 4 * 8 + rest.k % 8 / 4 * 4);
    Unrolled<kDigitVectors>::run([&]<int V>() QFUSE_LAMBDA {
      Words word;
      __builtin_memcpy(&word, codes + 64 * V, sizeof(word));
      const Ints code = bits<Ints>(word >> shift & 15u) - zero_points<Zero>(b, group, V);
      sums[V] = fused(__builtin_convertvector(code, Floats), broadcast(rest.value), sums[V]);
    });
  }
}

// Sums of a segment from those of its digits, exact until they become floats.
template <int Digits>
QFUSE_INLINE Floats segment_share(const __m512i* total, Floats unit, Floats upper) {
  const auto pair = [&](int d) QFUSE_LAMBDA {
    const Ints low = bits<Ints>(total[d * kDigitVectors]);
    return d + 1 < Digits ? low + (bits<Ints>(total[(d + 1) * kDigitVectors]) << 8) : low;
  };
  const Floats low = __builtin_convertvector(pair(0), Floats) * unit;
  if constexpr (Digits == 2) return low;
  return fused(__builtin_convertvector(pair(2), Floats), upper, low);
}

template <int Digits, bool Zero>
void multiply_four_bits(const qfuse::FourBitTile& t, float* sums) {
  const qfuse::RealBlock& b = t.block;
  const qfuse::DigitRow& row = t.row[0];
  const Floats unit = broadcast(bits<float>((127 + row.exponent) << 23));
  const Floats upper = unit * 0x1p16f;
  Floats sum[kDigitVectors] = {};
  int64_t rests = 0;
  in_segments(b.depth, b.group, [&](int64_t segment, int64_t group, int64_t k, int64_t count)
                                    QFUSE_LAMBDA {
    fetch_group_parameters(b, group);
    const int32_t* of_row = t.sums + 2 * segment;
    __m512i total[Digits * kDigitVectors];
    Unrolled<kDigitVectors>::run([&]<int V>() QFUSE_LAMBDA {
      const Ints zero = zero_points<Zero>(b, group, V);
      Unrolled<Digits>::run([&]<int D>() QFUSE_LAMBDA {
        total[D * kDigitVectors + V] =
            D % 2 ? _mm512_setzero_si512() : bits<__m512i>(Ints{} - zero * of_row[D / 2]);
      });
    });
    add_words<Digits>(b.codes + k / 8 * qfuse::kBlock * 4, t.digits + k / 4 * qfuse::kDigitBytes,
                      count / 8, total);
    Floats rest[kDigitVectors] = {};
    add_four_bit_rests<Zero>(b, row, group, k + count, rests, rest);
    Unrolled<kDigitVectors>::run([&]<int V>() QFUSE_LAMBDA {
      const Floats share = segment_share<Digits>(total + V, unit, upper) + rest[V];
      const float* scale = b.scale + group * qfuse::kBlock + V * kLanes;
      sum[V] = b.scale ? fused(share, load<Floats>(scale, kLanes), sum[V]) : sum[V] + share;
    });
  });
  Unrolled<kDigitVectors>::run(
      [&]<int V>() QFUSE_LAMBDA { store(sums + V * kLanes, sum[V], kLanes); });
}

// [segments][2] sums of the numbers of a row: of the digits 0 and 1, and of the digits 2 and 3.
inline void sum_segments(const int8_t* digits, int64_t depth, int64_t group, int32_t* sums) {
  const __m128i one = _mm_set1_epi8(1);
  in_segments(depth, group, [&](int64_t segment, int64_t, int64_t k, int64_t count) QFUSE_LAMBDA {
    const int8_t* from = digits + k / 4 * qfuse::kDigitBytes;
    __m128i sum = _mm_setzero_si128();
    for (int64_t i = 0; i < count / 4; ++i, from += qfuse::kDigitBytes) {
      sum = _mm_dpbusd_epi32(sum, one, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    int32_t of[4];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(of), sum);
    sums[2 * segment] = of[0] + of[1] * 256;
    sums[2 * segment + 1] = of[2] + of[3] * 256;
  });
}

void multiply_four_bit_digits(const qfuse::FourBitTile& t, float* sums) {
  with_flag(t.block.zero != nullptr, [&]<bool Zero>() {
    if (t.count == 2) return multiply_four_bits<2, Zero>(t, sums);
    if (t.count == 3) return multiply_four_bits<3, Zero>(t, sums);
    multiply_four_bits<4, Zero>(t, sums);
  });
}

}  // namespace
