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

// Within 16 bytes, packing takes four values of each operand in turn. The order in which the result
// is that of the operands.
constexpr int kPackedOrder[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

// Adds the zero point to integers of less than 2^31 in magnitude, and stores the first `columns` of
// them clamped to a range of int8 or uint8. Saturating to 16 and to 8 bits in between changes
// nothing. int8 values are computed as unsigned ones that are greater by 128. With `Packed`, the
// integers are in the order in which packing leaves them as they are stored.
template <int Vectors, bool Packed = false>
class ClampedStore {
 public:
  QFUSE_INLINE ClampedStore(const qfuse::Quantizer& q, qfuse::Element type,
                            int64_t columns = Vectors * kLanes) {
    const bool is_signed = type == qfuse::Element::s8;
    const int32_t zero = static_cast<int32_t>(q.zero) + (is_signed ? 128 : 0);
    flip_ = _mm512_set1_epi8(static_cast<char>(is_signed ? 0x80 : 0));
    zero_ = _mm512_set1_epi16(static_cast<int16_t>(zero));
    low_ = bound(q.least, zero);
    high_ = bound(q.most, zero);
    whole_ = columns >= Vectors * kLanes;
    mask_ = whole_ ? ~uint64_t{0} : (uint64_t{1} << columns) - 1;
  }

  QFUSE_INLINE void operator()(int8_t* out, const Ints* x) const {
    if constexpr (Vectors == 4) {
      __m512i bytes = clamped(_mm512_packus_epi16(moved(x[0], x[1]), moved(x[2], x[3])));
      if constexpr (!Packed) {
        bytes = _mm512_permutexvar_epi32(_mm512_loadu_si512(kPackedOrder), bytes);
      }
      if (whole_) return _mm512_storeu_si512(out, bytes);
      _mm512_mask_storeu_epi8(out, mask_, bytes);
    } else {
      static_assert(Vectors == 2 || (Vectors == 1 && !Packed));
      // Both halves of the packed bytes are the same.
      const __m512i words = moved(x[0], x[Vectors - 1]);
      const __m512i packed = clamped(_mm512_packus_epi16(words, words));
      if constexpr (Vectors == 2) {
        // Packed: as two vectors hold the four sums of 32 channels, see as_packed.
        const __m512i order =
            Packed ? _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 13, 5, 12, 4, 9, 1, 8, 0)
                   : _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 13, 9, 5, 1, 12, 8, 4, 0);
        const __m256i bytes = _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, packed));
        if (whole_) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
        _mm256_mask_storeu_epi8(out, static_cast<__mmask32>(mask_), bytes);
      } else {
        const __m512i order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
        const __m128i bytes = _mm512_castsi512_si128(_mm512_permutexvar_epi32(order, packed));
        if (whole_) return _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
        _mm_mask_storeu_epi8(out, static_cast<__mmask16>(mask_), bytes);
      }
    }
  }

 private:
  // Rounding is monotonic, so that clamping after it to rounded bounds is the same.
  QFUSE_INLINE static __m512i bound(float x, int32_t zero) {
    return _mm512_set1_epi8(static_cast<char>(_mm_cvtss_i32(_mm_set_ss(x)) + zero));
  }

  QFUSE_INLINE __m512i moved(Ints a, Ints b) const {
    return _mm512_adds_epi16(_mm512_packs_epi32(bits<__m512i>(a), bits<__m512i>(b)), zero_);
  }

  QFUSE_INLINE __m512i clamped(__m512i bytes) const {
    return _mm512_xor_si512(_mm512_min_epu8(_mm512_max_epu8(bytes, low_), high_), flip_);
  }

  __m512i zero_;
  __m512i low_;
  __m512i high_;
  __m512i flip_;
  uint64_t mask_;
  bool whole_;
};

}  // namespace
#endif
