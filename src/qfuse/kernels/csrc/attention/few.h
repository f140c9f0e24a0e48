// Attention of few queries, for any instruction set: keys and values are read once, in place. See
// AttentionKernels.
#pragma once

#include "attention/softmax.h"
#include "quantized/codes.h"

namespace {

constexpr int kDotVectors = qfuse::kDot / kLanes;
// Queries that share the conversion of what is read.
constexpr int kFewQueries = 4;
// Features whose sums are in registers.
constexpr int kFewVectors = kLanes == 16 ? 4 : 2;

// The elements of x side by side: lane i of the result is the sum of the lanes of x[i].
template <int Step = kLanes / 2>
QFUSE_INLINE Floats sums_of_lanes(Words* x) {
  Unrolled<Step>::run([&]<int I>() QFUSE_LAMBDA {
    exchange<Step>(x[I], x[I + Step]);
    x[I] = bits<Words>(bits<Floats>(x[I]) + bits<Floats>(x[I + Step]));
  });
  if constexpr (Step > 1) return sums_of_lanes<Step / 2>(x);
  return bits<Floats>(x[0]);
}

// Products of a key with Queries queries, kDot sums of each, and these as kLanes sums. `Whole` is
// whether features are a multiple of kDot.
template <Real Type, int Queries, bool Whole>
QFUSE_INLINE void multiply_key(const ElementOf<Type>* key, int64_t features, const float* queries,
                               int64_t ld, Words* sums) {
  Floats total[Queries * kDotVectors] = {};
  for (int64_t k = 0; k < features; k += qfuse::kDot) {
    Unrolled<kDotVectors>::run([&]<int V>() QFUSE_LAMBDA {
      const int64_t at = k + V * kLanes;
      if (!Whole && at >= features) return;
      const Floats x = load_real(key + at, Type, 0, Whole ? kLanes : features - at);
      Unrolled<Queries>::run([&]<int Q>() QFUSE_LAMBDA {
        Floats& sum = total[Q * kDotVectors + V];
        sum = fused(x, load<Floats>(queries + Q * ld + at, kLanes), sum);
      });
    });
  }
  Unrolled<Queries>::run([&]<int Q>() QFUSE_LAMBDA {
    Floats* parts = total + Q * kDotVectors;
    for (int half = kDotVectors / 2; half > 0; half /= 2) {
      for (int V = 0; V < half; ++V) parts[V] = parts[V] + parts[V + half];
    }
    sums[Q * kLanes] = bits<Words>(parts[0]);
  });
}

template <Real Type, int Queries, bool Whole>
QFUSE_INLINE void multiply_keys_of(const OperandRows& keys, const float* queries, int64_t ld,
                                   int64_t count, float* scores) {
  for (int64_t j = 0; j < keys.rows; j += kLanes) {
    Words sums[Queries * kLanes] = {};
    const int64_t some = keys.rows - j < kLanes ? keys.rows - j : kLanes;
    for (int64_t i = 0; i < some; ++i) {
      const auto* key = element_at<ElementOf<Type>>(keys, j + i, 0);
      multiply_key<Type, Queries, Whole>(key, keys.features, queries, ld, sums + i);
    }
    float* to = scores + j / qfuse::kBlock * count * qfuse::kBlock + j % qfuse::kBlock;
    Unrolled<Queries>::run([&]<int Q>() QFUSE_LAMBDA {
      store(to + Q * qfuse::kBlock, sums_of_lanes(sums + Q * kLanes), kLanes);
    });
  }
}

inline void multiply_keys(const OperandRows& keys, const float* queries, int64_t ld, int64_t count,
                          float* scores) {
  with_type(keys.type, [&]<Real Type>() {
    for (int64_t i = 0; i < count;) {
      i += with_rows<kFewQueries>(count - i, [&]<int Q>() {
        float* to = scores + i * qfuse::kBlock;
        if (keys.features % qfuse::kDot == 0) {
          multiply_keys_of<Type, Q, true>(keys, queries + i * ld, ld, count, to);
        } else {
          multiply_keys_of<Type, Q, false>(keys, queries + i * ld, ld, count, to);
        }
      });
    }
  });
}

// Adds weighted values of a panel of keys, for some vectors of features, which are `Whole` if all
// of them exist.
template <Real Type, int Queries, int Vectors, bool Whole>
QFUSE_INLINE void add_values_of(const OperandRows& values, int64_t first, int64_t keys,
                                int64_t feature, const float* weights, int64_t ld, float* sums) {
  Floats total[Queries * Vectors];
  const auto each = [&](const auto& f) QFUSE_LAMBDA {
    Unrolled<Queries * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
      f(total[I], sums + I / Vectors * ld + feature + I % Vectors * kLanes);
    });
  };
  each([](Floats& sum, const float* at) QFUSE_LAMBDA { sum = load<Floats>(at, kLanes); });
  for (int64_t j = 0; j < keys; ++j) {
    Floats x[Vectors];
    const auto* value = element_at<ElementOf<Type>>(values, first + j, feature);
    Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
      const int64_t rest = Whole ? kLanes : values.features - feature - V * kLanes;
      x[V] = rest > 0 ? load_real(value + V * kLanes, Type, 0, rest) : Floats{};
    });
    Unrolled<Queries * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
      const Floats w = broadcast(weights[I / Vectors * qfuse::kBlock + j]);
      total[I] = fused(w, x[I % Vectors], total[I]);
    });
  }
  each([](const Floats& sum, float* at) QFUSE_LAMBDA { store(at, sum, kLanes); });
}

inline void add_values(const OperandRows& values, const float* weights, int64_t count, int64_t ld,
                       float* sums) {
  with_type(values.type, [&]<Real Type>() {
    for (int64_t j = 0; j < values.rows; j += qfuse::kBlock, weights += count * qfuse::kBlock) {
      const int64_t keys = values.rows - j < qfuse::kBlock ? values.rows - j : qfuse::kBlock;
      for (int64_t i = 0; i < count;) {
        i += with_rows<kFewQueries>(count - i, [&]<int Q>() {
          constexpr int64_t kStep = kFewVectors * kLanes;
          const float* w = weights + i * qfuse::kBlock;
          int64_t c = 0;
          for (; c + kStep <= values.features; c += kStep) {
            add_values_of<Type, Q, kFewVectors, true>(values, j, keys, c, w, ld, sums + i * ld);
          }
          if (c < values.features) {
            add_values_of<Type, Q, kFewVectors, false>(values, j, keys, c, w, ld, sums + i * ld);
          }
        });
      }
    }
  });
}

inline void combine(const qfuse::PartialRows& p, int64_t row, Real type, void* out) {
  float greatest = -__builtin_inff();
  for (int64_t c = 0; c < p.chunks; ++c) {
    greatest = Greater()(p.greatest[c * p.rows + row], greatest);
  }
  const float base = greatest == -__builtin_inff() ? 0.0f : greatest;
  const auto factor = [&](int64_t c) QFUSE_LAMBDA {
    const float difference = p.greatest[c * p.rows + row] - base;
    return power_of_two(broadcast(difference * (p.scale * kLog2OfE)))[0];
  };
  float total = 0.0f;
  for (int64_t c = 0; c < p.chunks; ++c) total += p.total[c * p.rows + row] * factor(c);
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  with_type(type, [&]<Real Type>() {
    for (int64_t k = 0; k < p.features; k += kLanes) {
      Floats sum = {};
      for (int64_t c = 0; c < p.chunks; ++c) {
        const Floats part = load<Floats>(p.sums + (c * p.rows + row) * p.ld + k, kLanes);
        const float by = factor(c);
        // A chunk that counts nothing may have overflowed; what is not a number stays that.
        sum = sum + (by != 0.0f ? part * by : part == part ? Floats{} : part);
      }
      store_real(out, Type, k, sum * inverse, p.features - k);
    }
  });
}

constexpr qfuse::AttentionKernels attention_kernels{
    .copy = &copy_operand,
    .pack_columns = &pack_columns,
    .pack_rows = &pack_rows,
    .softmax = &softmax,
    .write = &write_result,
    .multiply_keys = &multiply_keys,
    .add_values = &add_values,
    .combine = &combine,
};

}  // namespace
