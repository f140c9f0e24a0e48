// Stores of small integers as 8-bit values, clamped to a range, with few instructions.
#pragma once

#include "rowwise/steps.h"

#if defined(__AVX512BW__)
namespace {

// Whether the steps of a quantization fit into what ClampedStore computes with 16 bits.
QFUSE_INLINE bool takes_clamped(const qfuse::Quantizer& q) {
  return q.plain && !q.divide && q.factor < 0x1p60f && q.zero >= -8192 && q.zero <= 8192;
}

// Whether no lane is NaN, nor so large that ClampedStore could not store it after rounding.
QFUSE_INLINE bool is_clamped_small(Floats x) {
  return _mm512_cmp_ps_mask(magnitude(x), broadcast(0x1p29f), _CMP_NLT_UQ) == 0;
}

// Adds the zero point to integers of less than 2^31 in magnitude, and stores them clamped to a range
// of int8 or uint8. Saturating to 16 and to 8 bits in between changes nothing.
template <int Vectors, bool Signed>
class ClampedStore {
 public:
  QFUSE_INLINE explicit ClampedStore(const qfuse::Quantizer& q)
      : zero_(_mm512_set1_epi16(static_cast<int16_t>(q.zero))),
        low_(bound(q.least, q.zero)),
        high_(bound(q.most, q.zero)) {}

  QFUSE_INLINE void operator()(int8_t* out, const Ints* x) const {
    // Within 16 bytes, packing takes four values of each operand in turn.
    if constexpr (Vectors == 4) {
      const __m512i a = moved(x[0], x[1]);
      const __m512i b = moved(x[2], x[3]);
      const __m512i packed =
          Signed ? _mm512_min_epi8(_mm512_max_epi8(_mm512_packs_epi16(a, b), low_), high_)
                 : _mm512_min_epu8(_mm512_max_epu8(_mm512_packus_epi16(a, b), low_), high_);
      const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
      _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, packed));
    } else {
      static_assert(Vectors == 2);
      const __m512i both = moved(x[0], x[1]);
      const __m256i a = _mm512_castsi512_si256(both);
      const __m256i b = _mm512_extracti64x4_epi64(both, 1);
      const __m256i low = _mm512_castsi512_si256(low_), high = _mm512_castsi512_si256(high_);
      const __m256i packed =
          Signed ? _mm256_min_epi8(_mm256_max_epi8(_mm256_packs_epi16(a, b), low), high)
                 : _mm256_min_epu8(_mm256_max_epu8(_mm256_packus_epi16(a, b), low), high);
      const __m256i order = _mm256_set_epi32(7, 3, 5, 1, 6, 2, 4, 0);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                          _mm256_permutevar8x32_epi32(packed, order));
    }
  }

 private:
  // Rounding is monotonic, so that clamping after it to rounded bounds is the same.
  QFUSE_INLINE static __m512i bound(float x, float zero) {
    const int32_t whole = _mm_cvtss_i32(_mm_set_ss(x)) + static_cast<int32_t>(zero);
    return _mm512_set1_epi8(static_cast<int8_t>(whole));
  }

  QFUSE_INLINE __m512i moved(Ints a, Ints b) const {
    return _mm512_adds_epi16(_mm512_packs_epi32(bits<__m512i>(a), bits<__m512i>(b)), zero_);
  }

  __m512i zero_;
  __m512i low_;
  __m512i high_;
};

}  // namespace
#endif
