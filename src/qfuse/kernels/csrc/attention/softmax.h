// The softmax of attention, for any instruction set. See ScoreRows.
#pragma once

#include "attention/pack.h"
#include "isa/reduce.h"

namespace {

constexpr int kScoreVectors = qfuse::kBlock / kLanes;
constexpr float kLog2OfE = 1.44269504f;

// 2^x for x <= 0, with a relative error of at most 0.71 * 2^-23, and 0 below -125, where a weight
// would be subnormal. x = n + r with |r| <= 1/2; the polynomial for 2^r has the least relative
// error that one with p(0) = 1 can have. Adding 1.5 * 2^23 rounds n to an integer in the low bits.
QFUSE_INLINE Floats power_of_two(Floats x) {
  const float push = 12582912.0f;
  const Floats pushed = x + push;
  const Floats n = pushed - push;
  const Floats r = x - n;
  Floats p = fused(r, 1.55946779e-4f, 1.34066434e-3f);
  p = fused(p, r, 9.61769279e-3f);
  p = fused(p, r, 5.55031039e-2f);
  p = fused(p, r, 2.40226522e-1f);
  p = fused(p, r, 6.93147242e-1f);
  p = fused(p, r, 1.0f);
#if defined(__AVX512F__)
  const Floats weight = _mm512_scalef_ps(p, n);
#else
  const Floats weight = p * bits<Floats>((bits<Words>(pushed) << 23) + 0x3f800000u);
#endif
  return x < -125.0f ? Floats{} : weight;
}

// Rounded to bfloat16. Only processors with AVX512_BF16 multiply in it, see RealKernels::type_for.
// The instruction flushes subnormals to zero, which no weight is. Inline assembly, because this
// file is not compiled for it.
QFUSE_INLINE Halves weights_in_bf16(Floats p) {
#if defined(__AVX512F__)
  __m256i halves;
  asm("vcvtneps2bf16 %1, %0" : "=v"(halves) : "v"(p));
  return bits<Halves>(halves);
#else
  return to_bf16(p);
#endif
}

// What a mask does to scores.
enum class Masking { none, adds, allows };

template <Masking Kind>
QFUSE_INLINE Floats masked_score(const qfuse::ScoreRows& s, int64_t at, Floats x, int64_t count) {
  if (Kind == Masking::none || count <= 0) return x;
  if (Kind == Masking::adds) {
    return x * s.scale + load<Floats>(static_cast<const float*>(s.mask) + at, count);
  }
  const Ints kept = widened(load<Bytes>(static_cast<const int8_t*>(s.mask) + at, count));
  // A sum, so that scores that are not a number stay that, as in torch.
  return x + (kept != 0 ? Floats{} : broadcast(-__builtin_inff()));
}

// Whether the mask of a row allows all of the 64 keys from there on.
template <Masking Kind>
QFUSE_INLINE bool allows_panel(const qfuse::ScoreRows& s, int64_t at) {
  if (Kind != Masking::allows) return false;
  const auto* mask = static_cast<const int8_t*>(s.mask) + at;
#if defined(__AVX512F__)
  const __m512i all = _mm512_loadu_si512(mask);
  return _mm512_test_epi8_mask(all, all) == ~__mmask64{};
#elif defined(__AVX2__)
  const auto half = [&](int64_t i) QFUSE_LAMBDA {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask + i));
  };
  // The lesser of unsigned bytes is 0 where one of them is.
  const __m256i least = _mm256_min_epu8(half(0), half(32));
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(least, _mm256_setzero_si256())) == 0;
#else
  for (int64_t i = 0; i < qfuse::kBlock; ++i) {
    if (mask[i] == 0) return false;
  }
  return true;
#endif
}

// Masks the scores of a panel, of which the first `keys` count, and takes the greatest ones.
template <Masking Kind, bool Whole>
QFUSE_INLINE void mask_and_take_greatest(const qfuse::ScoreRows& s, int64_t row, int64_t panel,
                                         int64_t keys, Floats* top) {
  float* at = s.scores + (panel * s.ld + row) * qfuse::kBlock;
  const int64_t first = row * s.mask_ld + panel * qfuse::kBlock;
  Unrolled<kScoreVectors>::run([&]<int V>() QFUSE_LAMBDA {
    const int64_t count = Whole ? kLanes : keys - V * kLanes;
    Floats x = load<Floats>(at + V * kLanes, kLanes);
    x = masked_score<Kind>(s, first + V * kLanes, x, count);
    if (!Whole) x = first_of(x, count, -__builtin_inff());
    if (Kind != Masking::none || !Whole) store(at + V * kLanes, x, kLanes);
    top[V] = greater(top[V], x);
  });
}

// The greatest score of a row of which the first `keys` count, masked.
template <Masking Kind>
QFUSE_INLINE float greatest_score(const qfuse::ScoreRows& s, int64_t row, int64_t keys) {
  Floats top[kScoreVectors];
  Unrolled<kScoreVectors>::run(
      [&]<int V>() QFUSE_LAMBDA { top[V] = broadcast(-__builtin_inff()); });
  int64_t panel = 0;
  for (; (panel + 1) * qfuse::kBlock <= keys; ++panel) {
    if (allows_panel<Kind>(s, row * s.mask_ld + panel * qfuse::kBlock)) {
      mask_and_take_greatest<Masking::none, true>(s, row, panel, qfuse::kBlock, top);
    } else {
      mask_and_take_greatest<Kind, true>(s, row, panel, qfuse::kBlock, top);
    }
  }
  const int64_t rest = keys - panel * qfuse::kBlock;
  if (rest > 0) mask_and_take_greatest<Kind, false>(s, row, panel, rest, top);
  return reduced<kScoreVectors>(top, Greater());
}

// Writes a vector of weights over the scores of a row of 64, as bfloat16 to the first half of their
// memory: columns have to be written in order, each after its scores were read.
template <bool ToBf16>
QFUSE_INLINE void store_weights(float* row, int64_t column, Floats p) {
  if constexpr (ToBf16) {
    store(reinterpret_cast<uint16_t*>(row) + column, weights_in_bf16(p), kLanes);
  } else {
    store(row + column, p, kLanes);
  }
}

template <Masking Kind, bool ToBf16>
void softmax_row(const qfuse::ScoreRows& s, int64_t row) {
  int64_t keys = s.visible + row < s.keys ? s.visible + row : s.keys;
  if (keys < 0) keys = 0;
  const float greatest = Greater()(greatest_score<Kind>(s, row, keys), s.greatest[row]);
  // Without a key, differences from 0 are infinite, and from themselves not a number.
  const float base = greatest == -__builtin_inff() ? 0.0f : greatest;
  // Scores that nothing was added to are scaled here: a positive scale does not change which is
  // greatest.
  const float scale = Kind == Masking::adds ? kLog2OfE : s.scale * kLog2OfE;
  Floats parts[kScoreVectors] = {};
  float* at = s.scores + row * qfuse::kBlock;
  int64_t panel = 0;
  for (; panel * qfuse::kBlock < keys; ++panel, at += s.ld * qfuse::kBlock) {
    Unrolled<kScoreVectors>::run([&]<int V>() QFUSE_LAMBDA {
      const Floats p = power_of_two((load<Floats>(at + V * kLanes, kLanes) - base) * scale);
      parts[V] = parts[V] + p;
      store_weights<ToBf16>(at, V * kLanes, p);
    });
  }
  for (; panel * qfuse::kBlock < s.keys; ++panel, at += s.ld * qfuse::kBlock) {
    Unrolled<kScoreVectors>::run(
        [&]<int V>() QFUSE_LAMBDA { store_weights<ToBf16>(at, V * kLanes, Floats{}); });
  }
  const float sum = reduced<kScoreVectors>(parts, Sum());
  const float factor = power_of_two(broadcast((s.greatest[row] - base) * scale))[0];
  s.total[row] = s.total[row] * factor + sum;
  s.greatest[row] = greatest;
  s.factor[row] = factor;
}

template <bool ToBf16>
void softmax_rows(const qfuse::ScoreRows& s) {
  for (int64_t row = 0; row < s.rows; ++row) {
    if (!s.mask) {
      softmax_row<Masking::none, ToBf16>(s, row);
    } else if (s.is_bool) {
      softmax_row<Masking::allows, ToBf16>(s, row);
    } else {
      softmax_row<Masking::adds, ToBf16>(s, row);
    }
  }
}

inline void softmax(const qfuse::ScoreRows& s) {
  s.product == Real::bf16 ? softmax_rows<true>(s) : softmax_rows<false>(s);
}

}  // namespace
