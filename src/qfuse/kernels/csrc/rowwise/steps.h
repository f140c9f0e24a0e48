// Epilogue ops, and the final quantization, on vectors of a row.
#pragma once

#include "rowwise/activations.h"

namespace {

constexpr int64_t kVectors = qfuse::kBlock / kLanes;

// Where 64 columns are more vectors than there are registers, their code is that of a loop, which
// compiles in a tenth of the time.
constexpr bool kUnrolls = kLanes > 4;

// Up to 64 adjacent columns: `Vectors` whole vectors, or any number of columns if that is 0.
template <int Vectors>
struct Span {
  int64_t column;  // the first one
  int64_t columns;

  // Calls f(vector, columns in it) for the vectors with at least one column.
  template <class F>
  QFUSE_INLINE void each(F f) const {
    if constexpr (Vectors > 0 && !kUnrolls) {
      for (int64_t v = 0; v < Vectors; ++v) f(v, kLanes);
    } else if constexpr (Vectors > 0) {
      // The vectors stay in registers only if their index is a constant.
      Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA { f(int64_t{V}, kLanes); });
    } else {
      for (int64_t v = 0; v * kLanes < columns; ++v) {
        const int64_t left = columns - v * kLanes;
        f(v, left < kLanes ? left : kLanes);
      }
    }
  }
};

// Calls f(first column, columns) with a number of whole vectors as a constant, from all of them
// down to one by halves, and then for the rest, if there is one.
template <int Vectors = kVectors, class F>
QFUSE_INLINE void each_width(int64_t columns, const F& f, int64_t first = 0) {
  constexpr int64_t kColumns = Vectors * kLanes;
  while (columns - first >= kColumns) {
    f.template operator()<Vectors>(first, kColumns);
    first += kColumns;
  }
  if constexpr (Vectors > 1 && kUnrolls) {
    each_width<Vectors / 2>(columns, f, first);
  } else if (first < columns) {
    f.template operator()<0>(first, columns - first);
  }
}

// x as an integer plus `zero`, or 0 if x is NaN.
QFUSE_INLINE Ints moved_nearest(Floats x, Ints zero) {
#if defined(__AVX512F__)
  const __mmask16 numbers = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
  return bits<Ints>(_mm512_maskz_add_epi32(numbers, bits<__m512i>(nearest(x)), bits<__m512i>(zero)));
#else
  return bits<Ints>(bits<Words>(nearest(x)) + bits<Words>(zero)) & (x == x);
#endif
}

// Quantized values by a plain quantizer, in float32.
QFUSE_INLINE Ints quantized_plain(const qfuse::Quantizer& q, Floats y) {
  const Floats x = q.divide ? y / q.factor : y * q.factor;
  return moved_nearest(clamp(x, q.least, q.most), broadcast(static_cast<int32_t>(q.zero)));
}

// Quantized values. Without `Rounding` the operations are in float32.
template <bool Rounding>
QFUSE_INLINE Ints quantized(const qfuse::Quantizer& q, Floats y) {
  if (!Rounding && q.plain) return quantized_plain(q, y);
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

// Elements of an operand as floats.
QFUSE_INLINE Floats load_operand(const qfuse::ElementRows& x, const qfuse::Step& s, int64_t at,
                                 int64_t count) {
  if (x.type < qfuse::Element::s8) {
    return load_real(x.data, static_cast<qfuse::Real>(x.type), at, count);
  }
  const Bytes bytes = load<Bytes>(static_cast<const int8_t*>(x.data) + at, count);
  const Ints codes = x.type == qfuse::Element::s8 ? widened(bytes) : widened_unsigned(bytes);
  return (__builtin_convertvector(codes, Floats) - s.b) * s.scale;
}

// Rounds the vectors `y` of a span.
template <int Vectors>
QFUSE_INLINE void round_all(qfuse::Real type, const Span<Vectors>& c, Floats* y) {
  if (type == qfuse::Real::f32) return;
  with_type(type, [&]<qfuse::Real Type>() QFUSE_LAMBDA {
    c.each([&](int64_t v, int64_t) QFUSE_LAMBDA { y[v] = rounded_to(Type, y[v]); });
  });
}

// The vectors whose functions are computed at a time fit into the registers.
constexpr int kTogether = kLanes == 16 ? 4 : 2;

template <int Vectors>
QFUSE_INLINE void gelu_all(const Span<Vectors>& c, Floats* y) {
  if constexpr (Vectors >= kTogether && kUnrolls) {
    Unrolled<Vectors / kTogether>::run(
        [&]<int I>() QFUSE_LAMBDA { gelu<kTogether>(y + I * kTogether); });
  } else {
    c.each([&](int64_t v, int64_t) QFUSE_LAMBDA { gelu<1>(y + v); });
  }
}

// Applies one epilogue op to the vectors `y` of a span.
template <int Vectors>
inline void apply(const qfuse::Step& s, const qfuse::ElementRows* extras, const Span<Vectors>& c,
                  int64_t row, Floats* y) {
  using Kind = qfuse::StepKind;
  const auto map = [&](auto f) QFUSE_LAMBDA {
    c.each([&](int64_t v, int64_t) QFUSE_LAMBDA { y[v] = f(y[v]); });
    round_all(s.type, c, y);
  };
  const auto zip = [&](auto f) QFUSE_LAMBDA {
    const qfuse::ElementRows& x = extras[s.extra];
    const int64_t first = row * x.ld + c.column;
    c.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      y[v] = f(y[v], load_operand(x, s, first + v * kLanes, count));
    });
    round_all(s.type, c, y);
  };
  switch (s.kind) {
    case Kind::relu:
      return map([](Floats y) { return at_least(y, 0.0f); });
    case Kind::gelu:
      gelu_all(c, y);
      return round_all(s.type, c, y);
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
    case Kind::elu:
      return map([&](Floats y) { return elu(y, s.a, s.b, s.scale); });
    case Kind::mish:
      return map([](Floats y) { return mish(y); });
    case Kind::quick_gelu:
      return map([&](Floats y) { return quick_gelu(y, s.a); });
    case Kind::squared_relu:
      return map([](Floats y) { return at_least(y, 0.0f) * at_least(y, 0.0f); });
    case Kind::add:
      return zip([&](Floats y, Floats x) { return y + x * s.a; });
    case Kind::mul:
      return zip([](Floats y, Floats x) { return y * x; });
    case Kind::prelu:
      return zip([](Floats y, Floats x) { return y > 0.0f ? y : y * x; });
    case Kind::cast:
      return map([](Floats y) { return y; });
    case Kind::round:
      return map([&](Floats y) { return stored(s, y); });
  }
}

}  // namespace
