// Depthwise sums for any instruction set. See DepthwiseTile.
//
// Four taps of a channel become the four bytes that the dot product instructions multiply: a
// vector of bytes of many channels from each of four pixels is interleaved. Instructions interleave
// within 16 bytes, so a sum is of four channels of each 16 in turn: the order of packed weights.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "isa/vec.h"

namespace {

// Vectors of 4 * Lanes bytes. In a class, since GCC ignores the attribute of an alias template.
template <int Lanes>
struct Wide {
  typedef uint8_t Bytes __attribute__((vector_size(4 * Lanes)));
  typedef int16_t Shorts __attribute__((vector_size(4 * Lanes)));
  typedef int32_t Ints __attribute__((vector_size(4 * Lanes)));
  typedef uint32_t Words __attribute__((vector_size(4 * Lanes)));
};
template <int Lanes>
using Quads = typename Wide<Lanes>::Bytes;
template <int Lanes>
using Sums = typename Wide<Lanes>::Ints;

// The bytes of four taps of Lanes channels each.
template <int Lanes>
struct Fours {
  Sums<Lanes> part[4];
};

#if defined(__AVX512F__)
QFUSE_INLINE Fours<16> interleave(Quads<16> a, Quads<16> b, Quads<16> c, Quads<16> d) {
  const __m512i low = _mm512_unpacklo_epi8(bits<__m512i>(a), bits<__m512i>(b));
  const __m512i high = _mm512_unpackhi_epi8(bits<__m512i>(a), bits<__m512i>(b));
  const __m512i other_low = _mm512_unpacklo_epi8(bits<__m512i>(c), bits<__m512i>(d));
  const __m512i other_high = _mm512_unpackhi_epi8(bits<__m512i>(c), bits<__m512i>(d));
  return {{bits<Sums<16>>(_mm512_unpacklo_epi16(low, other_low)),
           bits<Sums<16>>(_mm512_unpackhi_epi16(low, other_low)),
           bits<Sums<16>>(_mm512_unpacklo_epi16(high, other_high)),
           bits<Sums<16>>(_mm512_unpackhi_epi16(high, other_high))}};
}
#endif
#if defined(__AVX2__)
QFUSE_INLINE Fours<8> interleave(Quads<8> a, Quads<8> b, Quads<8> c, Quads<8> d) {
  const __m256i low = _mm256_unpacklo_epi8(bits<__m256i>(a), bits<__m256i>(b));
  const __m256i high = _mm256_unpackhi_epi8(bits<__m256i>(a), bits<__m256i>(b));
  const __m256i other_low = _mm256_unpacklo_epi8(bits<__m256i>(c), bits<__m256i>(d));
  const __m256i other_high = _mm256_unpackhi_epi8(bits<__m256i>(c), bits<__m256i>(d));
  return {{bits<Sums<8>>(_mm256_unpacklo_epi16(low, other_low)),
           bits<Sums<8>>(_mm256_unpackhi_epi16(low, other_low)),
           bits<Sums<8>>(_mm256_unpacklo_epi16(high, other_high)),
           bits<Sums<8>>(_mm256_unpackhi_epi16(high, other_high))}};
}
#endif
QFUSE_INLINE Fours<4> interleave(Quads<4> a, Quads<4> b, Quads<4> c, Quads<4> d) {
#if defined(__SSE2__)
  const __m128i low = _mm_unpacklo_epi8(bits<__m128i>(a), bits<__m128i>(b));
  const __m128i high = _mm_unpackhi_epi8(bits<__m128i>(a), bits<__m128i>(b));
  const __m128i other_low = _mm_unpacklo_epi8(bits<__m128i>(c), bits<__m128i>(d));
  const __m128i other_high = _mm_unpackhi_epi8(bits<__m128i>(c), bits<__m128i>(d));
  return {{bits<Sums<4>>(_mm_unpacklo_epi16(low, other_low)),
           bits<Sums<4>>(_mm_unpackhi_epi16(low, other_low)),
           bits<Sums<4>>(_mm_unpacklo_epi16(high, other_high)),
           bits<Sums<4>>(_mm_unpackhi_epi16(high, other_high))}};
#else
  Fours<4> fours;
  for (int i = 0; i < 16; ++i) {
    const uint32_t word = a[i] | b[i] << 8 | c[i] << 16 | static_cast<uint32_t>(d[i]) << 24;
    fours.part[i / 4][i % 4] = static_cast<int32_t>(word);
  }
  return fours;
#endif
}

// Adds to `sum` the dot products of four u8 of `x` with four s8 of `w`, wrapping.
template <int Lanes>
QFUSE_INLINE void add_products(Sums<Lanes>& sum, Sums<Lanes> x, Sums<Lanes> w) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
#else
  using Short = typename Wide<Lanes>::Shorts;
  const Short even_w = (bits<Short>(w) << 8) >> 8;
  const Short odd_w = bits<Short>(w) >> 8;
  const Short even_x = bits<Short>(x) & 0xff;
  const Short odd_x = (bits<Short>(x) >> 8) & 0xff;
  // Two products of a lane. Both fit into 16 bits, u8 x s8.
  const auto both = [](Short a, Short b) {
    if constexpr (sizeof(Short) == 16) {
#if defined(__SSE2__)
      return bits<Sums<Lanes>>(_mm_madd_epi16(bits<__m128i>(a), bits<__m128i>(b)));
#endif
    }
#if defined(__AVX2__)
    if constexpr (sizeof(Short) == 32) {
      return bits<Sums<Lanes>>(_mm256_madd_epi16(bits<__m256i>(a), bits<__m256i>(b)));
    }
#endif
    const Sums<Lanes> products = bits<Sums<Lanes>>(a * b);
    return ((products << 16) >> 16) + (products >> 16);
  };
  using Word = typename Wide<Lanes>::Words;
  const Word even = bits<Word>(both(even_x, even_w));
  sum = bits<Sums<Lanes>>(bits<Word>(sum) + even + bits<Word>(both(odd_x, odd_w)));
#endif
}

template <int Lanes, bool Flip>
QFUSE_INLINE Quads<Lanes> load_pixel(const uint8_t* from) {
  Quads<Lanes> x;
  __builtin_memcpy(&x, from, sizeof(x));
  if constexpr (Flip) x = x ^ uint8_t{0x80};
  return x;
}

// Adds four taps of 4 * Lanes channels to sums.
template <int Lanes>
QFUSE_INLINE void add_taps(Sums<Lanes>* sums, const Fours<Lanes>& x, const int8_t* weight) {
  Unrolled<4>::run([&]<int I>() QFUSE_LAMBDA {
    Sums<Lanes> w;
    __builtin_memcpy(&w, weight + I * qfuse::kBlock, sizeof(w));
    add_products<Lanes>(sums[I], x.part[I], w);
  });
}

// Sums in the order of the channels.
#if defined(__AVX512F__)
QFUSE_INLINE Fours<16> in_order(const Sums<16>* sums) {
  const auto quarters = [&](int a, int b, auto which) QFUSE_LAMBDA {
    return _mm512_shuffle_i32x4(bits<__m512i>(sums[a]), bits<__m512i>(sums[b]), which());
  };
  const auto low = [] { return 0x44; };
  const auto high = [] { return 0xee; };
  const __m512i a = quarters(0, 1, low), b = quarters(0, 1, high);
  const __m512i c = quarters(2, 3, low), d = quarters(2, 3, high);
  return {{bits<Sums<16>>(_mm512_shuffle_i32x4(a, c, 0x88)),
           bits<Sums<16>>(_mm512_shuffle_i32x4(a, c, 0xdd)),
           bits<Sums<16>>(_mm512_shuffle_i32x4(b, d, 0x88)),
           bits<Sums<16>>(_mm512_shuffle_i32x4(b, d, 0xdd))}};
}
#endif
#if defined(__AVX2__)
QFUSE_INLINE Fours<8> in_order(const Sums<8>* sums) {
  const __m256i a = bits<__m256i>(sums[0]), b = bits<__m256i>(sums[1]);
  const __m256i c = bits<__m256i>(sums[2]), d = bits<__m256i>(sums[3]);
  return {{bits<Sums<8>>(_mm256_permute2x128_si256(a, b, 0x20)),
           bits<Sums<8>>(_mm256_permute2x128_si256(c, d, 0x20)),
           bits<Sums<8>>(_mm256_permute2x128_si256(a, b, 0x31)),
           bits<Sums<8>>(_mm256_permute2x128_si256(c, d, 0x31))}};
}
#endif
QFUSE_INLINE Fours<4> in_order(const Sums<4>* sums) {
  return {{sums[0], sums[1], sums[2], sums[3]}};
}

template <int Lanes>
QFUSE_INLINE void store_sums(int32_t* to, const Sums<Lanes>* sums) {
  const Fours<Lanes> ordered = in_order(sums);
  __builtin_memcpy(to, ordered.part, sizeof(ordered.part));
}

// Adds the products of one output pixel, or of two that share their taps, and of 4 * Lanes channels
// from `channel` on.
template <int Lanes, bool Flip, bool Two>
QFUSE_INLINE void add_pixels(const qfuse::DepthwiseTile& t, const uint8_t* const* pixel,
                             int64_t channel, Sums<Lanes>* first, Sums<Lanes>* second) {
  const int32_t* tap = t.tap;
  for (int64_t g = 0; g < t.groups; ++g, tap += qfuse::kGroup) {
    const int64_t at = t.channel + channel;
    const int64_t weight = g * qfuse::kBlock * qfuse::kGroup + channel;
    const Fours<Lanes> x = interleave(load_pixel<Lanes, Flip>(pixel[tap[0]] + at),
                                      load_pixel<Lanes, Flip>(pixel[tap[1]] + at),
                                      load_pixel<Lanes, Flip>(pixel[tap[2]] + at),
                                      load_pixel<Lanes, Flip>(pixel[tap[3]] + at));
    add_taps<Lanes>(first, x, t.weight + weight);
    if constexpr (Two) add_taps<Lanes>(second, x, t.next + weight);
  }
}

// Calls f<Two>(i) for all output pixels: `Two` where i and the following one share their taps.
template <class F>
QFUSE_INLINE void each_pixels(const qfuse::DepthwiseTile& t, const F& f) {
  int64_t i = 0;
  if (t.next) {
    for (; i + 2 <= t.pixels; i += 2) f.template operator()<true>(i);
  }
  for (; i < t.pixels; ++i) f.template operator()<false>(i);
}

template <int Lanes, bool Flip>
void depthwise_channels(const qfuse::DepthwiseTile& t, int64_t channel, int32_t* sums) {
  each_pixels(t, [&]<bool Two>(int64_t i) QFUSE_LAMBDA {
    Sums<Lanes> first[4] = {};
    Sums<Lanes> second[4] = {};
    add_pixels<Lanes, Flip, Two>(t, t.pixel + i * t.step, channel, first, second);
    int32_t* to = sums + i * qfuse::kBlock + channel;
    store_sums<Lanes>(to, first);
    if constexpr (Two) store_sums<Lanes>(to + qfuse::kBlock, second);
  });
}

// The widest vectors first, then the narrowest that hold the rest.
template <bool Flip>
void depthwise_block(const qfuse::DepthwiseTile& t, int32_t* sums) {
  constexpr int kLeast = 4;
  int64_t channel = 0;
  while (channel < t.channels) {
#if defined(__AVX512F__)
    if (t.channels - channel > 32) {
      depthwise_channels<16, Flip>(t, channel, sums);
      return;
    }
#endif
#if defined(__AVX2__)
    if (t.channels - channel > 16) {
      depthwise_channels<8, Flip>(t, channel, sums);
      channel += 32;
      continue;
    }
#endif
    depthwise_channels<kLeast, Flip>(t, channel, sums);
    channel += 4 * kLeast;
  }
}

void depthwise(const qfuse::DepthwiseTile& t, int32_t* sums) {
  if (t.flip) return depthwise_block<true>(t, sums);
  depthwise_block<false>(t, sums);
}

}  // namespace
