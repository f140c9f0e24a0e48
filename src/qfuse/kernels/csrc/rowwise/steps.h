// Epilogue ops, and the final quantization, on vectors of a row.
#pragma once

#include "rowwise/activations.h"

namespace {

constexpr int64_t kVectors = qfuse::kBlock / kLanes;

// Up to 64 adjacent columns; exactly 64 if `Whole`.
template <bool Whole>
struct Span {
  int64_t column;  // the first one
  int64_t columns;

  // Calls f(vector, columns in it) for the vectors with at least one column.
  template <class F>
  QFUSE_INLINE void each(F f) const {
    if constexpr (Whole) {
      // The vectors stay in registers only if their index is a constant.
      Unrolled<kVectors>::run([&]<int V>() QFUSE_LAMBDA { f(int64_t{V}, kLanes); });
    } else {
      for (int64_t v = 0; v * kLanes < columns; ++v) {
        const int64_t left = columns - v * kLanes;
        f(v, left < kLanes ? left : kLanes);
      }
    }
  }
};

// Quantized values as floats. Without `Rounding` the operations are in float32.
template <bool Rounding>
QFUSE_INLINE Ints quantized(const qfuse::Quantizer& q, Floats y) {
  const auto rounded = [&](Floats x) QFUSE_LAMBDA { return Rounding ? rounded_to(q.type, x) : x; };
  const Floats given = rounded(y);
  const Floats x = rounded(q.divide ? given / q.factor : given * q.factor);
  const Floats code =
      q.zero_first ? round_even(rounded(x + q.zero)) : rounded(round_even(x) + q.zero);
  const Floats kept = clamp(code, q.low, q.high);
  // NaN becomes 0, as in torch's conversion.
  return __builtin_convertvector(kept == kept ? kept : Floats{}, Ints);
}

// Quantizes and dequantizes `y`.
QFUSE_INLINE Floats stored(const qfuse::Step& s, Floats y) {
  const qfuse::Quantizer q{s.a, s.b, s.low, s.high, false, false, qfuse::Real::f32};
  return (__builtin_convertvector(quantized<false>(q, y), Floats) - s.b) * s.scale;
}

// Applies one epilogue op to the vectors `y` of a span.
template <bool Whole>
inline void apply(const qfuse::Step& s, const qfuse::RealRows* extras, const Span<Whole>& c,
                  int64_t row, Floats* y) {
  using Kind = qfuse::StepKind;
  const auto map = [&](auto f) QFUSE_LAMBDA {
    c.each([&](int64_t v, int64_t) QFUSE_LAMBDA { y[v] = rounded_to(s.type, f(y[v])); });
  };
  const auto zip = [&](auto f) QFUSE_LAMBDA {
    const qfuse::RealRows& x = extras[s.extra];
    const int64_t first = row * x.ld + c.column;
    c.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      y[v] = rounded_to(s.type, f(y[v], load_real(x.data, x.type, first + v * kLanes, count)));
    });
  };
  switch (s.kind) {
    case Kind::relu:
      return map([](Floats y) { return at_least(y, 0.0f); });
    case Kind::gelu:
      return map([](Floats y) { return gelu(y); });
    case Kind::gelu_tanh:
      return map([](Floats y) { return gelu_tanh(y); });
    case Kind::silu:
      return map([](Floats y) { return silu(y); });
    case Kind::sigmoid:
      return map([](Floats y) { return sigmoid(y); });
    case Kind::tanh:
      return map([](Floats y) { return hyperbolic_tangent(y); });
    case Kind::hardtanh:
      return map([&](Floats y) { return clamp(y, s.a, s.b); });
    case Kind::hardswish:
      return map([](Floats y) { return hardswish(y); });
    case Kind::hardsigmoid:
      return map([](Floats y) { return hardsigmoid(y); });
    case Kind::leaky_relu:
      return map([&](Floats y) { return y > 0.0f ? y : y * s.a; });
    case Kind::add:
      return zip([&](Floats y, Floats x) { return y + x * s.a; });
    case Kind::mul:
      return zip([](Floats y, Floats x) { return y * x; });
    case Kind::cast:
      return map([](Floats y) { return y; });
    case Kind::round:
      return map([&](Floats y) { return stored(s, y); });
  }
}

}  // namespace
