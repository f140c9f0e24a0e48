// Integer sums that become quantized values at once, after one epilogue op at most, which adds a
// quantized operand or is an activation function: the operations of Epilogue with all constants in
// registers.
#pragma once

#include "linear/columns.h"

namespace {

// What is applied to floats, a row after the other: `apply` to `count` floats from column `at` on,
// or where `stays_small` holds, `apply_to_small` to all `count` floats of some vectors. `reach` is
// at least the magnitude of all that is computed from floats of the magnitude `y`. `prefetch` asks
// for what is read of the row that is so many rows further on.
struct NoStep {
  QFUSE_INLINE NoStep(const qfuse::Epilogue&, int64_t, int64_t) {}
  QFUSE_INLINE void prefetch(int64_t) const {}
  QFUSE_INLINE void advance() {}
  QFUSE_INLINE Floats apply(Floats y, int64_t, int64_t) const { return y; }
  template <int Vectors>
  QFUSE_INLINE void apply_to_small(Floats*, int64_t) const {}
  QFUSE_INLINE Floats reach(Floats y) const { return y; }
};

struct HardSwish : NoStep {
  using NoStep::NoStep;
  QFUSE_INLINE Floats apply(Floats y, int64_t, int64_t) const { return hardswish(y); }
  // The quotient by a constant is a product that is corrected by its remainder (P. Markstein, IA-64
  // and Elementary Functions): the same, except below 2^-100, which quantizes to zero either way.
  template <int Vectors>
  QFUSE_INLINE void apply_to_small(Floats* y, int64_t) const {
    const Floats sixth = broadcast(1.0f / 6.0f);
    Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
      const Floats product = y[V] * clamp(y[V] + 3.0f, 0.0f, 6.0f);
      const Floats near = product * sixth;
      y[V] = fused(fused(near, broadcast(-6.0f), product), sixth, near);
    });
  }
  QFUSE_INLINE Floats reach(Floats y) const { return y * 6.0f; }
};

// A function whose results are not greater in magnitude than what it is given; both are rounded.
// `cast` is no function.
template <qfuse::StepKind Kind, qfuse::Real Type>
struct Activation : NoStep {
  using NoStep::NoStep;
  Floats apply(Floats y, int64_t, int64_t) const = delete;
  template <int Vectors>
  QFUSE_INLINE void apply_to_small(Floats* y, int64_t) const {
    using Step = qfuse::StepKind;
    round<Vectors>(y);
    if constexpr (Kind == Step::gelu) gelu<Vectors>(y);
    Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
      if constexpr (Kind == Step::gelu_tanh) y[V] = gelu_tanh(y[V]);
      if constexpr (Kind == Step::silu) y[V] = silu(y[V]);
    });
    if constexpr (Kind != Step::cast) round<Vectors>(y);
  }
  QFUSE_INLINE Floats reach(Floats y) const { return y * 2.0f; }

 private:
  // Where `stays_small` holds there is no NaN.
  template <int Vectors>
  QFUSE_INLINE static void round(Floats* y) {
    if constexpr (Type == qfuse::Real::bf16) {
      Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
        y[V] = bits<Floats>(bf16_of_number(y[V]) & 0xffff0000u);
      });
    }
  }
};

// The rows of a quantized operand from a row and a column on.
template <qfuse::Element Type>
struct Addend {
  QFUSE_INLINE Addend(const qfuse::Epilogue& e, int64_t row, int64_t column)
      : zero(broadcast(e.step[0].b)), scale(broadcast(e.step[0].scale)), alpha(broadcast(e.step[0].a)) {
    const qfuse::ElementRows& x = e.extra[e.step[0].extra];
    from = static_cast<const int8_t*>(x.data) + row * x.ld + column;
    ld = x.ld;
  }
  QFUSE_INLINE void prefetch(int64_t rows) const { __builtin_prefetch(from + rows * ld); }
  QFUSE_INLINE void advance() { from += ld; }
  QFUSE_INLINE Floats apply(Floats y, int64_t at, int64_t count) const {
    const Bytes bytes = load<Bytes>(from + at, count);
    const Ints codes = Type == qfuse::Element::s8 ? widened(bytes) : widened_unsigned(bytes);
    return y + (__builtin_convertvector(codes, Floats) - zero) * scale * alpha;
  }
  template <int Vectors>
  QFUSE_INLINE void apply_to_small(Floats* y, int64_t count) const {
    Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
      y[V] = apply(y[V], V * kLanes, count - V * kLanes);
    });
  }
  QFUSE_INLINE Floats reach(Floats y) const {
    return y + magnitude((magnitude(zero) + 256.0f) * scale * alpha);
  }

  const int8_t* from;
  int64_t ld;
  Floats zero;
  Floats scale;
  Floats alpha;
};

// Whether sums of integers with the same parameters for all rows become quantized values.
QFUSE_INLINE bool quantizes_sums(const qfuse::Epilogue& e) {
  const bool stored = e.out_type == qfuse::Element::s8 || e.out_type == qfuse::Element::u8;
  const bool plain = stored && e.quantizer.plain && !e.quantizer.divide;
  return plain && !e.real_sums && !e.zero_per_row && !e.w_zero;
}

// Calls f<Step>() with the cheap operation on sums before they become quantized values, and returns
// its result; false if it is another one.
template <class F>
QFUSE_INLINE bool with_step(const qfuse::Epilogue& e, const F& f) {
  using qfuse::Element;
  if (!quantizes_sums(e) || e.real != qfuse::Real::f32) return false;
  if (e.steps == 0) return f.template operator()<NoStep>();
  const qfuse::Step& step = e.step[0];
  if (e.steps != 1 || step.type != qfuse::Real::f32) return false;
  if (step.kind == qfuse::StepKind::hardswish) return f.template operator()<HardSwish>();
  if (step.kind != qfuse::StepKind::add) return false;
  const Element type = e.extra[step.extra].type;
  if (type == Element::s8) return f.template operator()<Addend<Element::s8>>();
  if (type == Element::u8) return f.template operator()<Addend<Element::u8>>();
  return false;
}

#if defined(__AVX512BW__)
// The same with an activation function, or with none in bfloat16.
template <qfuse::Real Type, class F>
QFUSE_INLINE bool with_activation(const qfuse::Epilogue& e, const F& f) {
  using Kind = qfuse::StepKind;
  if constexpr (Type != qfuse::Real::f32) {
    if (e.steps == 0) return f.template operator()<Activation<Kind::cast, Type>>();
  }
  if (e.steps != 1 || e.step[0].type != Type) return false;
  switch (e.step[0].kind) {
    case Kind::gelu:
      return f.template operator()<Activation<Kind::gelu, Type>>();
    case Kind::gelu_tanh:
      return f.template operator()<Activation<Kind::gelu_tanh, Type>>();
    case Kind::silu:
      return f.template operator()<Activation<Kind::silu, Type>>();
    default:
      return false;
  }
}

// The constants of `columns` adjacent output features; those that fill the last vectors are 0.
template <int Vectors>
struct SmallColumns {
  QFUSE_INLINE SmallColumns(const qfuse::Epilogue& e, int64_t column, int64_t columns)
      : count(columns) {
    const auto zero = static_cast<uint32_t>(e.x_zero[0]);
    Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
      const int64_t at = column + V * kLanes, left = columns - V * kLanes;
      scale[V] = load<Floats>(e.w_scale + at, left);
      bias[V] = e.bias ? load<Floats>(e.bias + at, left) : Floats{};
      offset[V] = bits<Words>(load<Ints>(e.w_sums + at, left)) * zero;
    });
  }

  int64_t count;
  Floats scale[Vectors];
  Floats bias[Vectors];
  Words offset[Vectors];  // the zero point of the rows times the sum of the weights
};

// Calls f<vectors>() with the number of vectors, 1, 2 or 4, that hold so many columns.
template <class F>
QFUSE_INLINE bool with_vectors(int64_t columns, const F& f) {
  if (columns > 2 * kLanes) return f.template operator()<4>();
  if (columns > kLanes) return f.template operator()<2>();
  return f.template operator()<1>();
}

// Whether no sum leads to a NaN, nor to a value whose rounded quotient by the output scale is 2^30
// or more, and the steps of the quantization fit into what is computed with 16 bits.
template <int Vectors, class Step>
QFUSE_INLINE bool stays_small(const qfuse::Epilogue& e, const SmallColumns<Vectors>& c,
                              const Step& step) {
  const Floats scale = magnitude(broadcast(e.x_scale[0]));
  const Floats factor = broadcast(e.quantizer.factor);
  bool small = !e.scale_per_row && takes_clamped(e.quantizer);
  Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
    // In the order of the operations, so that what overflows in them does so here.
    const Floats y = 0x1p31f * scale * magnitude(c.scale[V]) + magnitude(c.bias[V]);
    small = small && is_clamped_small(step.reach(y) * factor);
  });
  return small;
}

// From the sums of a row without their offsets to its quantized values, where `stays_small` holds.
template <int Vectors, bool Packed, class Step>
QFUSE_INLINE void quantize_row(const SmallColumns<Vectors>& c, const Step& step,
                               const ClampedStore<Vectors, Packed>& store, float scale,
                               float factor, const Words* totals, int8_t* out) {
  Floats y[Vectors];
  Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
    const Floats sum = __builtin_convertvector(bits<Ints>(totals[V]), Floats);
    y[V] = sum * scale * c.scale[V] + c.bias[V];
  });
  step.template apply_to_small<Vectors>(y, c.count);
  Ints x[Vectors];
  Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA { x[V] = nearest(y[V] * factor); });
  store(out, x);
}

// quantize_columns where `stays_small` holds; else false.
template <int Vectors, class Step>
QFUSE_INLINE bool quantize_small(const qfuse::Epilogue& e, const int32_t* sums, int64_t row,
                                 int64_t rows, int64_t column, int64_t columns) {
  const SmallColumns<Vectors> c(e, column, columns);
  Step step(e, row, column);
  if (!stays_small(e, c, step)) return false;
  const ClampedStore<Vectors> store(e.quantizer, e.out_type, columns);
  const float scale = e.x_scale[0], factor = e.quantizer.factor;
  auto* out = static_cast<int8_t*>(e.out) + (row - e.out_row) * e.out_ld + column;
  for (int64_t i = 0; i < rows; ++i, sums += qfuse::kBlock, out += e.out_ld, step.advance()) {
    Words totals[Vectors];
    Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
      totals[V] = bits<Words>(load<Ints>(sums + V * kLanes, kLanes)) - c.offset[V];
    });
    quantize_row(c, step, store, scale, factor, totals, out);
  }
  return true;
}
#endif

template <int Vectors, class Step>
void quantize_columns(const qfuse::Epilogue& e, const int32_t* sums, int64_t row, int64_t rows,
                      int64_t column, int64_t columns) {
  const Columns<Vectors> c(e, column, columns);
  Step step(e, row, column);
  auto* out = static_cast<int8_t*>(e.out) + (row - e.out_row) * e.out_ld + column;
  const qfuse::Quantizer q = e.quantizer;
  const Ints zero = broadcast(static_cast<int32_t>(q.zero));
  for (int64_t i = 0; i < rows; ++i, sums += qfuse::kBlock, out += e.out_ld, step.advance()) {
    const float scale = row_scale(e, row + i);
    c.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      const Words total = bits<Words>(load<Ints>(sums + v * kLanes, kLanes)) - c.offset[v];
      const Floats x = __builtin_convertvector(bits<Ints>(total), Floats) * scale * c.scale[v];
      // Without a bias this is x + 0, which quantizes to the same.
      const Floats y = step.apply(x + c.bias[v], v * kLanes, count) * q.factor;
      store(out + v * kLanes,
            low_bytes(moved_nearest(clamp(y, q.least, q.most), zero)), count);
    });
  }
}

template <class Step>
void quantize_all(const qfuse::Epilogue& e, const int32_t* sums, int64_t row, int64_t rows,
                  int64_t column, int64_t columns) {
#if defined(__AVX512BW__)
  const bool done = with_vectors(columns, [&]<int Vectors>() QFUSE_LAMBDA {
    return quantize_small<Vectors, Step>(e, sums, row, rows, column, columns);
  });
  if (done) return;
#endif
  each_width(columns, [&]<int Vectors>(int64_t first, int64_t count) {
    quantize_columns<Vectors, Step>(e, sums + first, row, rows, column + first, count);
  });
}

// Whether an activation function was applied and its results quantized.
QFUSE_INLINE bool quantize_activation(const qfuse::Epilogue& e, const int32_t* sums, int64_t row,
                                      int64_t rows, int64_t column, int64_t columns) {
#if defined(__AVX512BW__)
  const auto quantize = [&]<class Step>() {
    return with_vectors(columns, [&]<int Vectors>() QFUSE_LAMBDA {
      return quantize_small<Vectors, Step>(e, sums, row, rows, column, columns);
    });
  };
  if (!quantizes_sums(e)) return false;
  if (e.real == qfuse::Real::f32) return with_activation<qfuse::Real::f32>(e, quantize);
  if (e.real == qfuse::Real::bf16) return with_activation<qfuse::Real::bf16>(e, quantize);
#endif
  return false;
}

}  // namespace
