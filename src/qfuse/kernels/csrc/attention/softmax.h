// The softmax of attention, for any instruction set. See ScoreRows.
#pragma once

#include "attention/pack.h"
#include "isa/reduce.h"
#include "rowwise/activations.h"

namespace {

constexpr int kScoreVectors = qfuse::kBlock / kLanes;

// e^x for x <= 0. Below -87 it is 0: the least result of `exponential` times a large value counts.
QFUSE_INLINE Floats weight_of(Floats x) { return x < -87.0f ? Floats{} : exponential(x); }

template <bool Masked>
QFUSE_INLINE Floats masked_score(const qfuse::ScoreRows& s, int64_t row, int64_t key, Floats x,
                                 int64_t count) {
  if (!Masked || count <= 0) return x;
  x = x * s.scale;
  const int64_t at = row * s.mask_ld + key;
  if (!s.is_bool) return x + load<Floats>(static_cast<const float*>(s.mask) + at, count);
  const Ints kept = widened(load<Bytes>(static_cast<const int8_t*>(s.mask) + at, count));
  // A sum, so that scores that are not a number stay that, as in torch.
  return x + (kept != 0 ? Floats{} : broadcast(-__builtin_inff()));
}

// Masks the scores of a panel, of which the first `keys` count, and takes the greatest ones.
template <bool Masked, bool Whole>
QFUSE_INLINE void mask_and_take_greatest(const qfuse::ScoreRows& s, int64_t row, int64_t panel,
                                         int64_t keys, Floats* top) {
  float* at = s.scores + (panel * s.ld + row) * qfuse::kBlock;
  Unrolled<kScoreVectors>::run([&]<int V>() QFUSE_LAMBDA {
    const int64_t count = Whole ? kLanes : keys - V * kLanes;
    const int64_t key = panel * qfuse::kBlock + V * kLanes;
    Floats x = masked_score<Masked>(s, row, key, load<Floats>(at + V * kLanes, kLanes), count);
    if (!Whole) x = first_of(x, count, -__builtin_inff());
    if (Masked || !Whole) store(at + V * kLanes, x, kLanes);
    top[V] = greater(top[V], x);
  });
}

// Writes a vector of weights over the scores of a row of 64, as bfloat16 to the first half of their
// memory: columns have to be written in order, each after its scores were read.
template <bool ToBf16>
QFUSE_INLINE void store_weights(float* row, int64_t column, Floats p) {
  if constexpr (ToBf16) {
    store(reinterpret_cast<uint16_t*>(row) + column, to_bf16(p), kLanes);
  } else {
    store(row + column, p, kLanes);
  }
}

template <bool Masked, bool ToBf16>
void softmax_row(const qfuse::ScoreRows& s, int64_t row) {
  int64_t keys = s.visible + row < s.keys ? s.visible + row : s.keys;
  if (keys < 0) keys = 0;
  const float none = -__builtin_inff();
  const int64_t whole = keys / qfuse::kBlock, rest = keys % qfuse::kBlock;
  Floats parts[kScoreVectors];
  Unrolled<kScoreVectors>::run([&]<int V>() QFUSE_LAMBDA { parts[V] = broadcast(none); });
  for (int64_t panel = 0; panel < whole; ++panel) {
    mask_and_take_greatest<Masked, true>(s, row, panel, qfuse::kBlock, parts);
  }
  if (rest > 0) mask_and_take_greatest<Masked, false>(s, row, whole, rest, parts);
  const float greatest = Greater()(reduced<kScoreVectors>(parts, Greater()), s.greatest[row]);
  // Without a key, differences from 0 are infinite, and from themselves not a number.
  const float base = greatest == none ? 0.0f : greatest;
  // Without a mask, differences are scaled: a positive scale does not change which is greatest.
  const float scale = Masked ? 1.0f : s.scale;
  Unrolled<kScoreVectors>::run([&]<int V>() QFUSE_LAMBDA { parts[V] = Floats{}; });
  float* at = s.scores + row * qfuse::kBlock;
  int64_t panel = 0;
  for (; panel * qfuse::kBlock < keys; ++panel, at += s.ld * qfuse::kBlock) {
    Unrolled<kScoreVectors>::run([&]<int V>() QFUSE_LAMBDA {
      const Floats p = weight_of((load<Floats>(at + V * kLanes, kLanes) - base) * scale);
      parts[V] = parts[V] + p;
      store_weights<ToBf16>(at, V * kLanes, p);
    });
  }
  for (; panel * qfuse::kBlock < s.keys; ++panel, at += s.ld * qfuse::kBlock) {
    Unrolled<kScoreVectors>::run(
        [&]<int V>() QFUSE_LAMBDA { store_weights<ToBf16>(at, V * kLanes, Floats{}); });
  }
  const float sum = reduced<kScoreVectors>(parts, Sum());
  const float factor = weight_of(broadcast((s.greatest[row] - base) * scale))[0];
  s.total[row] = s.total[row] * factor + sum;
  s.greatest[row] = greatest;
  s.factor[row] = factor;
}

template <bool ToBf16>
void softmax_rows(const qfuse::ScoreRows& s) {
  for (int64_t row = 0; row < s.rows; ++row) {
    s.mask ? softmax_row<true, ToBf16>(s, row) : softmax_row<false, ToBf16>(s, row);
  }
}

inline void softmax(const qfuse::ScoreRows& s) {
  s.product == Real::bf16 ? softmax_rows<true>(s) : softmax_rows<false>(s);
}

}  // namespace
