// Splits float rows into 8-bit digits, with AVX512; see DigitRow.
#pragma once

#include "isa/vec.h"
#include "digits/digit_rows.h"

namespace {

// How often the largest values are tried as rests, so that smaller ones fit.
constexpr int kWindows = 12;
// A value may change by less than the rounding of a product in float32.
constexpr float kLeastShare = 0x1p-24f;

// The digits that hold the significand of a type, and all but few exponents of usual rows.
QFUSE_INLINE int64_t least_digits(qfuse::Real type) {
  return type == qfuse::Real::bf16 ? 2 : type == qfuse::Real::f16 ? 3 : 4;
}

// The exponent of the highest bit of a finite float that is not zero.
QFUSE_INLINE int exponent_of(uint32_t size) {
  const int exponent = static_cast<int>(size >> 23);
  return exponent > 0 ? exponent - 127 : 31 - __builtin_clz(size) - 149;
}

// Numbers of some digits that count 2^exponent.
struct Window {
  int64_t digits;
  int exponent;

  // The greatest number whose signed digits, 127 at most, are that many; as a float.
  QFUSE_INLINE float most() const {
    return digits == 2 ? 0x7f7fp0f : digits == 3 ? 0x7f7f7fp0f : 0x7f7f7fp8f;
  }
};

// Values as numbers, and what these leave out.
struct Split {
  QFUSE_INLINE Split(const Window& window, Floats x) {
    const Floats power = broadcast(static_cast<float>(window.exponent));
    const Floats exact = _mm512_scalef_ps(x, -power);
    const __mmask16 fits = _mm512_cmp_ps_mask(magnitude(exact), broadcast(window.most()), _CMP_LE_OQ);
    number = _mm512_maskz_roundscale_ps(fits, exact, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    rest = x - Floats(_mm512_scalef_ps(number, power));
    kept = _mm512_cmp_ps_mask(magnitude(rest), magnitude(x) * kLeastShare, _CMP_GT_OQ);
    large = static_cast<__mmask16>(~fits);
  }

  Floats number;
  Floats rest;
  __mmask16 kept;   // lanes whose rest counts
  __mmask16 large;  // lanes beyond the window
};

// Calls f(k, values) with vectors of a row, zeros behind its end.
template <class F>
QFUSE_INLINE void in_vectors(const void* x, qfuse::Real type, int64_t columns, const F& f) {
  const int64_t whole = columns / kLanes * kLanes;
  for (int64_t k = 0; k < whole; k += kLanes) f(k, load_real(x, type, k, kLanes));
  if (whole < columns) f(whole, load_real(x, type, whole, columns - whole));
}

// The greatest magnitude of a row, as bits: not finite from those of infinity on.
inline uint32_t greatest_of(const void* x, qfuse::Real type, int64_t columns) {
  Words most = {};
  in_vectors(x, type, columns, [&](int64_t, Floats values) QFUSE_LAMBDA {
    const Words size = bits<Words>(magnitude(values));
    most = size > most ? size : most;
  });
  uint32_t greatest = 0;
  for (int64_t i = 0; i < kLanes; ++i) greatest = most[i] > greatest ? most[i] : greatest;
  return greatest;
}

struct Outside {
  int64_t kept = 0;
  int64_t large = 0;
};

inline Outside outside_of(const Window& window, const void* x, qfuse::Real type, int64_t columns) {
  Outside outside;
  in_vectors(x, type, columns, [&](int64_t, Floats values) QFUSE_LAMBDA {
    const Split split(window, values);
    outside.kept += __builtin_popcount(split.kept);
    outside.large += __builtin_popcount(split.large);
  });
  return outside;
}

// Finds numbers that leave out few values; without digits if there are none.
inline Window window_of(const void* x, qfuse::Real type, int64_t columns, int64_t most,
                        uint32_t greatest) {
  for (int64_t digits = least_digits(type); digits <= most; ++digits) {
    const int64_t few = columns / (digits < most ? qfuse::kRestShare : qfuse::kRestShare / 2);
    // One more, since a significand of ones does not fit; it is rarely needed.
    int exponent = exponent_of(greatest) + 3 - 8 * static_cast<int>(digits);
    const auto value = bits<float>(greatest);
    const Window tight{digits, exponent - 1};
    if (!Split(tight, broadcast(value)).large) --exponent;
    for (int i = 0; i < kWindows; ++i, --exponent) {
      const Window window{digits, exponent};
      const Outside outside = outside_of(window, x, type, columns);
      if (outside.kept <= few) return window;
      if (outside.large > few) break;
    }
  }
  return {0, 0};
}

// Signed digits of numbers, those of one place of four k adjacent: adding 128 to every digit carries.
QFUSE_INLINE __m512i digits_of(Ints numbers) {
  const __m512i middle = _mm512_set1_epi8(-128);
  const __m512i places = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i biased = _mm512_add_epi32(bits<__m512i>(numbers), middle);
  return _mm512_shuffle_epi8(_mm512_xor_si512(biased, middle), places);
}

template <int Place>
QFUSE_INLINE void store_digits(int8_t* to, __m512i digits) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_extracti32x4_epi32(digits, Place));
}

// Pairs of lanes, as wide as two.
QFUSE_INLINE __m512i pair_sums(Ints numbers) {
  const auto n = bits<__m512i>(numbers);
  const __m512i odd = _mm512_srai_epi64(n, 32);
  return _mm512_add_epi64(odd, _mm512_srai_epi64(_mm512_slli_epi64(n, 32), 32));
}

inline qfuse::DigitRow split_row(const void* x, qfuse::Real type, int64_t columns, int64_t most,
                                 const qfuse::DigitPlace& to) {
  const uint32_t greatest = greatest_of(x, type, columns);
  if (greatest >= 0x7f800000u) return {};
  const Window window = greatest == 0 ? Window{least_digits(type), 0}
                                      : window_of(x, type, columns, most, greatest);
  qfuse::DigitRow row{window.digits, window.exponent, 0, 0, to.rest};
  if (row.digits == 0 || row.digits > most) return {};
  int8_t* digits = to.digits;
  __m512i sum = _mm512_setzero_si512();
  in_vectors(x, type, columns, [&](int64_t k, Floats values) QFUSE_LAMBDA {
    const Split split(window, values);
    const Ints numbers = nearest(split.number);
    sum = _mm512_add_epi64(sum, pair_sums(numbers));
    const __m512i places = digits_of(numbers);
    Unrolled<4>::run([&]<int G>() QFUSE_LAMBDA { store_digits<G>(digits + G * to.step, places); });
    digits += 4 * to.step;
    for (unsigned kept = split.kept; kept; kept &= kept - 1) {
      const int lane = __builtin_ctz(kept);
      row.rest[row.rests++] = {k + lane, split.rest[lane]};
    }
  });
  row.sum = _mm512_reduce_add_epi64(sum);
  return row;
}

}  // namespace
