// Depthwise sums for any instruction set. See DepthwiseTile.
//
// Four taps of a channel become the four bytes that the dot product instructions multiply: a
// vector of bytes of many channels from each of four pixels is interleaved.
#pragma once

#include "isa/vec.h"

namespace {

constexpr int64_t kWide = 4 * kLanes;  // channels of a vector of bytes

using Quads = uint8_t __attribute__((vector_size(kWide)));

// Orders the 32-bit parts so that the results of `interleave` are in the order of the channels:
// interleaving works within 16 bytes.
QFUSE_INLINE Quads ordered(Quads x) {
#if defined(__AVX512F__)
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  return bits<Quads>(_mm512_permutexvar_epi32(order, bits<__m512i>(x)));
#elif defined(__AVX2__)
  const __m256i order = _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0);
  return bits<Quads>(_mm256_permutevar8x32_epi32(bits<__m256i>(x), order));
#else
  return x;
#endif
}

// The bytes of four taps of kLanes channels each.
struct Fours {
  Ints part[4];
};

#if defined(__AVX512F__)
QFUSE_INLINE Fours interleave(Quads a, Quads b, Quads c, Quads d) {
  const __m512i low = _mm512_unpacklo_epi8(bits<__m512i>(a), bits<__m512i>(b));
  const __m512i high = _mm512_unpackhi_epi8(bits<__m512i>(a), bits<__m512i>(b));
  const __m512i other_low = _mm512_unpacklo_epi8(bits<__m512i>(c), bits<__m512i>(d));
  const __m512i other_high = _mm512_unpackhi_epi8(bits<__m512i>(c), bits<__m512i>(d));
  return {{bits<Ints>(_mm512_unpacklo_epi16(low, other_low)),
           bits<Ints>(_mm512_unpackhi_epi16(low, other_low)),
           bits<Ints>(_mm512_unpacklo_epi16(high, other_high)),
           bits<Ints>(_mm512_unpackhi_epi16(high, other_high))}};
}
#elif defined(__AVX2__)
QFUSE_INLINE Fours interleave(Quads a, Quads b, Quads c, Quads d) {
  const __m256i low = _mm256_unpacklo_epi8(bits<__m256i>(a), bits<__m256i>(b));
  const __m256i high = _mm256_unpackhi_epi8(bits<__m256i>(a), bits<__m256i>(b));
  const __m256i other_low = _mm256_unpacklo_epi8(bits<__m256i>(c), bits<__m256i>(d));
  const __m256i other_high = _mm256_unpackhi_epi8(bits<__m256i>(c), bits<__m256i>(d));
  return {{bits<Ints>(_mm256_unpacklo_epi16(low, other_low)),
           bits<Ints>(_mm256_unpackhi_epi16(low, other_low)),
           bits<Ints>(_mm256_unpacklo_epi16(high, other_high)),
           bits<Ints>(_mm256_unpackhi_epi16(high, other_high))}};
}
#else
// Compilers have an instruction for it, where the processor has one.
QFUSE_INLINE Fours interleave(Quads a, Quads b, Quads c, Quads d) {
  Fours fours;
  for (int64_t channel = 0; channel < kWide; ++channel) {
    const uint32_t word = a[channel] | b[channel] << 8 | c[channel] << 16 |
                          static_cast<uint32_t>(d[channel]) << 24;
    fours.part[channel / kLanes][channel % kLanes] = static_cast<int32_t>(word);
  }
  return fours;
}
#endif

// sum + the dot products of four u8 of `x` with four s8 of `w`, wrapping.
QFUSE_INLINE Ints with_products(Ints sum, Ints x, Ints w) {
#if defined(__AVX512VNNI__)
  __m512i total = bits<__m512i>(sum);
  asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(bits<__m512i>(x)), "v"(bits<__m512i>(w)));
  return bits<Ints>(total);
#else
  const Shorts even_w = (bits<Shorts>(w) << 8) >> 8;
  const Shorts odd_w = bits<Shorts>(w) >> 8;
  const Shorts even_x = bits<Shorts>(x) & 0xff;
  const Shorts odd_x = bits<Shorts>(bits<Words>(x) >> 8) & 0xff;
#if defined(__AVX2__)
  const __m256i even = _mm256_madd_epi16(bits<__m256i>(even_x), bits<__m256i>(even_w));
  const __m256i odd = _mm256_madd_epi16(bits<__m256i>(odd_x), bits<__m256i>(odd_w));
  return bits<Ints>(bits<Words>(sum) + bits<Words>(even) + bits<Words>(odd));
#else
  // u8 x s8 fits into 16 bits.
  const auto both = [](Shorts products) {
    const Ints p = bits<Ints>(products);
    return bits<Words>((p << 16) >> 16) + bits<Words>(p >> 16);
  };
  return bits<Ints>(bits<Words>(sum) + both(even_x * even_w) + both(odd_x * odd_w));
#endif
#endif
}

template <bool Flip>
QFUSE_INLINE Quads load_pixel(const uint8_t* from) {
  Quads x;
  __builtin_memcpy(&x, from, sizeof(x));
  if constexpr (Flip) x = x ^ uint8_t{0x80};
  return ordered(x);
}

// One output pixel, kWide channels.
template <bool Flip>
QFUSE_INLINE void depthwise_pixel(const qfuse::DepthwiseTile& t, const uint8_t* const* pixel,
                                  int64_t channel, int32_t* sums) {
  Ints total[4] = {};
  const int8_t* w = t.weight + channel * qfuse::kGroup;
  const int32_t* tap = t.tap;
  for (int64_t g = 0; g < t.groups; ++g, tap += 4, w += qfuse::kBlock * qfuse::kGroup) {
    const int64_t at = t.channel + channel;
    const Fours x = interleave(
        load_pixel<Flip>(pixel[tap[0]] + at), load_pixel<Flip>(pixel[tap[1]] + at),
        load_pixel<Flip>(pixel[tap[2]] + at), load_pixel<Flip>(pixel[tap[3]] + at));
    Unrolled<4>::run([&]<int I>() QFUSE_LAMBDA {
      Ints weights;
      __builtin_memcpy(&weights, w + I * kLanes * qfuse::kGroup, sizeof(weights));
      total[I] = with_products(total[I], x.part[I], weights);
    });
  }
  Unrolled<4>::run([&]<int I>() QFUSE_LAMBDA { store(sums + I * kLanes, total[I], kLanes); });
}

template <bool Flip>
void depthwise_pixels(const qfuse::DepthwiseTile& t, int32_t* sums) {
  for (int64_t channel = 0; channel < t.channels; channel += kWide) {
    for (int64_t i = 0; i < t.pixels; ++i) {
      depthwise_pixel<Flip>(t, t.pixel + i * t.step, channel, sums + i * qfuse::kBlock + channel);
    }
  }
}

void depthwise(const qfuse::DepthwiseTile& t, int32_t* sums) {
  if (t.flip) return depthwise_pixels<true>(t, sums);
  depthwise_pixels<false>(t, sums);
}

}  // namespace
