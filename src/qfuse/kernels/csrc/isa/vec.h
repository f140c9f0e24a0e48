// Vectors in the compiler's vector extension types, as wide as the registers that the file is
// compiled for: one source for every instruction set.
//
// Everything is in an unnamed namespace and inlined, see kernel_api.h. Compiled with
// -ffp-contract=off the operations are the same on every path, so the paths agree bit for bit:
// multiply-adds are fused only where the source says so.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "kernel_api.h"

#define QFUSE_INLINE inline __attribute__((always_inline))
#define QFUSE_LAMBDA __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Shorts = int16_t __attribute__((vector_size(4 * kLanes)));  // two per lane
using Numbers = int16_t __attribute__((vector_size(2 * kLanes)));  // one per lane
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using Bytes = int8_t __attribute__((vector_size(kLanes)));

// Calls f(0), ..., f(Count - 1) with a constant index. GCC unrolls loops over arrays too late for
// the arrays to be kept in registers.
template <int Count>
struct Unrolled {
  template <class F>
  static QFUSE_INLINE void run(const F& f) {
    Unrolled<Count - 1>::run(f);
    f.template operator()<Count - 1>();
  }
};
template <>
struct Unrolled<0> {
  template <class F>
  static QFUSE_INLINE void run(const F&) {}
};

template <class To, class From>
QFUSE_INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// The first elements of a vector, fewer than kLanes.
#if defined(__AVX512F__)
QFUSE_INLINE __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1u);
}

template <class Vector, class Element>
QFUSE_INLINE Vector load_first(const Element* from, int64_t count) {
  const __mmask16 mask = first_lanes(count);
  if constexpr (sizeof(Element) == 4) return bits<Vector>(_mm512_maskz_loadu_epi32(mask, from));
  if constexpr (sizeof(Element) == 2) return bits<Vector>(_mm256_maskz_loadu_epi16(mask, from));
  if constexpr (sizeof(Element) == 1) return bits<Vector>(_mm_maskz_loadu_epi8(mask, from));
}

template <class Element, class Vector>
QFUSE_INLINE void store_first(Element* to, Vector v, int64_t count) {
  const __mmask16 mask = first_lanes(count);
  if constexpr (sizeof(Element) == 4) _mm512_mask_storeu_epi32(to, mask, bits<__m512i>(v));
  if constexpr (sizeof(Element) == 2) _mm256_mask_storeu_epi16(to, mask, bits<__m256i>(v));
  if constexpr (sizeof(Element) == 1) _mm_mask_storeu_epi8(to, mask, bits<__m128i>(v));
}
#else
template <class Vector, class Element>
QFUSE_INLINE Vector load_first(const Element* from, int64_t count) {
  Vector v = {};
  if (count > 0) __builtin_memcpy(&v, from, count * sizeof(Element));
  return v;
}

template <class Element, class Vector>
QFUSE_INLINE void store_first(Element* to, Vector v, int64_t count) {
  if (count > 0) __builtin_memcpy(to, &v, count * sizeof(Element));
}
#endif

// Loads `count` elements; the remaining lanes are zero. Never reads past the elements.
template <class Vector, class Element>
QFUSE_INLINE Vector load(const Element* from, int64_t count) {
  static_assert(sizeof(Vector) == kLanes * sizeof(Element));
  if (count < kLanes) return load_first<Vector>(from, count);
  Vector v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

template <class Element, class Vector>
QFUSE_INLINE void store(Element* to, Vector v, int64_t count) {
  static_assert(sizeof(Vector) == kLanes * sizeof(Element));
  if (count < kLanes) return store_first(to, v, count);
  __builtin_memcpy(to, &v, sizeof(v));
}

// Subtracting zero is a no-op for compilers; adding zero is not, as it turns -0.0 into 0.0.
QFUSE_INLINE Floats broadcast(float x) { return x - Floats{}; }
QFUSE_INLINE Ints broadcast(int32_t x) { return Ints{} + x; }

// fused(a, b, c) is a * b + c, rounded once. at_least and at_most propagate a NaN in x: comparisons
// with it are false, and the instructions return their second operand. Compilers do not recognize
// that the two are equivalent.
// lesser and greater return b if one of the two is NaN. nearest rounds half to even; x has to fit.
#if defined(__AVX512F__)
QFUSE_INLINE Floats lesser(Floats a, Floats b) { return _mm512_min_ps(a, b); }
QFUSE_INLINE Floats greater(Floats a, Floats b) { return _mm512_max_ps(a, b); }
QFUSE_INLINE Ints nearest(Floats x) { return bits<Ints>(_mm512_cvtps_epi32(x)); }
QFUSE_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
QFUSE_INLINE Floats at_least(Floats x, float low) { return _mm512_max_ps(broadcast(low), x); }
QFUSE_INLINE Floats at_most(Floats x, float high) { return _mm512_min_ps(broadcast(high), x); }
#elif defined(__AVX2__) && defined(__FMA__)
QFUSE_INLINE Floats lesser(Floats a, Floats b) { return _mm256_min_ps(a, b); }
QFUSE_INLINE Floats greater(Floats a, Floats b) { return _mm256_max_ps(a, b); }
QFUSE_INLINE Ints nearest(Floats x) { return bits<Ints>(_mm256_cvtps_epi32(x)); }
QFUSE_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
QFUSE_INLINE Floats at_least(Floats x, float low) { return _mm256_max_ps(broadcast(low), x); }
QFUSE_INLINE Floats at_most(Floats x, float high) { return _mm256_min_ps(broadcast(high), x); }
#else
QFUSE_INLINE Floats lesser(Floats a, Floats b) { return a < b ? a : b; }
QFUSE_INLINE Floats greater(Floats a, Floats b) { return a > b ? a : b; }
QFUSE_INLINE Ints nearest(Floats x) {
  const float push = 12582912.0f;  // 1.5 * 2^23: the fraction falls out of the mantissa
  return bits<Ints>(x + push) - bits<Ints>(Floats{} + push);
}
QFUSE_INLINE Floats fused(Floats a, Floats b, Floats c) {
  for (int64_t i = 0; i < kLanes; ++i) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
}
QFUSE_INLINE Floats at_least(Floats x, float low) { return x < low ? broadcast(low) : x; }
QFUSE_INLINE Floats at_most(Floats x, float high) { return x > high ? broadcast(high) : x; }
#endif
QFUSE_INLINE Floats fused(Floats a, Floats b, float c) { return fused(a, b, broadcast(c)); }
QFUSE_INLINE Floats fused(Floats a, float b, float c) {
  return fused(a, broadcast(b), broadcast(c));
}
QFUSE_INLINE Floats clamp(Floats x, float low, float high) {
  return at_most(at_least(x, low), high);
}

QFUSE_INLINE Floats magnitude(Floats x) { return bits<Floats>(bits<Words>(x) & 0x7fffffffu); }

// Half to even, by pushing the fraction out of the mantissa. From 2^22 on that would lose bits of
// x, but there the only fractions are halves, and from 2^23 on all floats are integers.
QFUSE_INLINE Floats round_even(Floats x) {
  const float push = 8388608.0f;  // 2^23
  const Words sign = bits<Words>(x) & 0x80000000u;
  const Floats whole = (magnitude(x) + push) - push;
  return magnitude(x) < push ? bits<Floats>(bits<Words>(whole) | sign) : x;
}

// Compilers would widen the elements of a vector one by one, or by halves.
QFUSE_INLINE Ints widened(Bytes b) {
#if defined(__AVX512F__)
  return bits<Ints>(_mm512_cvtepi8_epi32(bits<__m128i>(b)));
#elif defined(__AVX2__)
  return bits<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bits<int64_t>(b))));
#else
  return __builtin_convertvector(b, Ints);
#endif
}

QFUSE_INLINE Ints widened(Numbers n) {
#if defined(__AVX512F__)
  return bits<Ints>(_mm512_cvtepi16_epi32(bits<__m256i>(n)));
#elif defined(__AVX2__)
  return bits<Ints>(_mm256_cvtepi16_epi32(bits<__m128i>(n)));
#else
  return __builtin_convertvector(n, Ints);
#endif
}

// Unsigned halves.
QFUSE_INLINE Words widened(Halves h) {
#if defined(__AVX512F__)
  return bits<Words>(_mm512_cvtepu16_epi32(bits<__m256i>(h)));
#elif defined(__AVX2__)
  return bits<Words>(_mm256_cvtepu16_epi32(bits<__m128i>(h)));
#else
  return __builtin_convertvector(h, Words);
#endif
}

// The low bytes of the elements. Compilers would store one after the other.
QFUSE_INLINE Bytes low_bytes(Ints x) {
#if defined(__AVX512F__)
  return bits<Bytes>(_mm512_cvtepi32_epi8(bits<__m512i>(x)));
#elif defined(__AVX2__)
  const __m256i first = _mm256_broadcastd_epi32(_mm_cvtsi32_si128(0x0c080400));
  const __m256i bytes = _mm256_shuffle_epi8(bits<__m256i>(x), first);
  const __m128i low = _mm256_castsi256_si128(bytes);
  return bits<Bytes>(_mm_cvtsi128_si64(_mm_unpacklo_epi32(low, _mm256_extracti128_si256(bytes, 1))));
#else
  return __builtin_convertvector(x, Bytes);
#endif
}

// The high halves of the elements.
QFUSE_INLINE Halves high_halves(Words w) {
#if defined(__AVX512F__)
  return bits<Halves>(_mm512_cvtepi32_epi16(bits<__m512i>(w >> 16)));
#elif defined(__AVX2__)
  const __m256i high = bits<__m256i>(w >> 16);
  const __m256i twice = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0b1000);
  return bits<Halves>(_mm256_castsi256_si128(twice));
#else
  return __builtin_convertvector(w >> 16, Halves);
#endif
}

// Unsigned bytes.
QFUSE_INLINE Ints widened_unsigned(Bytes b) {
#if defined(__AVX512F__)
  return bits<Ints>(_mm512_cvtepu8_epi32(bits<__m128i>(b)));
#elif defined(__AVX2__)
  return bits<Ints>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits<int64_t>(b))));
#else
  return __builtin_convertvector(b, Ints) & 0xff;
#endif
}

QFUSE_INLINE Floats from_bf16(Halves h) {
  return bits<Floats>(widened(h) << 16);
}

// A number rounded to bfloat16, which is the high half of a float; the low half is undefined.
QFUSE_INLINE Words bf16_of_number(Floats x) {
  const Words w = bits<Words>(x);
  return w + 0x7fffu + ((w >> 16) & 1u);
}

// The same, also of NaN.
QFUSE_INLINE Words bf16_in_high_half(Floats x) {
  return x == x ? bf16_of_number(x) : Words{} + 0x7fc00000u;
}

QFUSE_INLINE Halves to_bf16(Floats x) {
  return high_halves(bf16_in_high_half(x));
}

// A float16 in the low half of each element. This and `to_f16` are the conversions of
// c10/util/Half.h (after M. Dukhan's FP16 library), a vector at a time.
QFUSE_INLINE Floats from_half(Words low) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits<__m512i>(low)));
#else
  const Words w = low << 16;
  const Words sign = w & 0x80000000u;
  const Words twice = w + w;
  const Floats normal = bits<Floats>((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
  const Floats small = bits<Floats>((twice >> 17) | (126u << 23)) - 0.5f;
  const Words value = twice < (1u << 27) ? bits<Words>(small) : bits<Words>(normal);
  return bits<Floats>(sign | value);
#endif
}

QFUSE_INLINE Floats from_f16(Halves h) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(bits<__m256i>(h));
#else
  return from_half(widened(h));
#endif
}

QFUSE_INLINE Halves to_f16(Floats x) {
  const Floats base = (magnitude(x) * 0x1.0p+112f) * 0x1.0p-110f;
  const Words w = bits<Words>(x);
  const Words twice = w + w;
  const Words exponent = twice & 0xff000000u;
  const Words bias = exponent < 0x71000000u ? Words{} + 0x71000000u : exponent;
  const Words sum = bits<Words>(bits<Floats>((bias >> 1) + 0x07800000u) + base);
  const Words finite = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
  const Words value = twice > 0xff000000u ? Words{} + 0x7e00u : finite;
  return high_halves((w & 0x80000000u) | (value << 16));
}

QFUSE_INLINE Floats rounded_to(qfuse::Real type, Floats x) {
  switch (type) {
    case qfuse::Real::bf16:
      return bits<Floats>(bf16_in_high_half(x) & 0xffff0000u);
    case qfuse::Real::f16:
      return from_f16(to_f16(x));
    default:
      return x;
  }
}

QFUSE_INLINE Floats load_real(const void* data, qfuse::Real type, int64_t at, int64_t count) {
  switch (type) {
    case qfuse::Real::bf16:
      return from_bf16(load<Halves>(static_cast<const uint16_t*>(data) + at, count));
    case qfuse::Real::f16:
      return from_f16(load<Halves>(static_cast<const uint16_t*>(data) + at, count));
    default:
      return load<Floats>(static_cast<const float*>(data) + at, count);
  }
}

QFUSE_INLINE void store_real(void* to, qfuse::Real type, int64_t at, Floats value, int64_t count) {
  if (type == qfuse::Real::f32) return store(static_cast<float*>(to) + at, value, count);
  const Halves halves = type == qfuse::Real::bf16 ? to_bf16(value) : to_f16(value);
  store(static_cast<uint16_t*>(to) + at, halves, count);
}

// Calls f with the type as a constant.
template <class F>
QFUSE_INLINE auto with_type(qfuse::Real type, const F& f) {
  switch (type) {
    case qfuse::Real::bf16:
      return f.template operator()<qfuse::Real::bf16>();
    case qfuse::Real::f16:
      return f.template operator()<qfuse::Real::f16>();
    default:
      return f.template operator()<qfuse::Real::f32>();
  }
}

}  // namespace
