// Integer sums that become quantized values at once, after one epilogue op at most, which adds a
// quantized operand or is a hard swish: the operations of Epilogue with all constants in registers.
#pragma once

#include "linear/columns.h"

namespace {

// What is applied to floats, a row after the other: `apply`, or where `stays_small` holds
// `apply_to_small`, to `count` floats from column `at` on. `reach` is at least the magnitude of
// all that is computed from floats of the magnitude `y`. `prefetch` asks for what is read of the
// row that is so many rows further on.
struct NoStep {
  QFUSE_INLINE NoStep(const qfuse::Epilogue&, int64_t, int64_t) {}
  QFUSE_INLINE void prefetch(int64_t) const {}
  QFUSE_INLINE void advance() {}
  QFUSE_INLINE Floats apply(Floats y, int64_t, int64_t) const { return y; }
  QFUSE_INLINE Floats apply_to_small(Floats y, int64_t, int64_t) const { return y; }
  QFUSE_INLINE Floats reach(Floats y) const { return y; }
};

struct HardSwish : NoStep {
  using NoStep::NoStep;
  QFUSE_INLINE Floats apply(Floats y, int64_t, int64_t) const { return hardswish(y); }
  // The quotient by a constant is a product that is corrected by its remainder (P. Markstein, IA-64
  // and Elementary Functions): the same, except below 2^-100, which quantizes to zero either way.
  QFUSE_INLINE Floats apply_to_small(Floats y, int64_t, int64_t) const {
    const Floats sixth = broadcast(1.0f / 6.0f);
    const Floats product = y * clamp(y + 3.0f, 0.0f, 6.0f);
    const Floats near = product * sixth;
    return fused(fused(near, broadcast(-6.0f), product), sixth, near);
  }
  QFUSE_INLINE Floats reach(Floats y) const { return y * 6.0f; }
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
  QFUSE_INLINE Floats apply_to_small(Floats y, int64_t at, int64_t count) const {
    return apply(y, at, count);
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

// Calls f<Step>() with what happens to sums before they become quantized values, and returns its
// result; false if it is none of the above.
template <class F>
QFUSE_INLINE bool with_step(const qfuse::Epilogue& e, const F& f) {
  using qfuse::Element;
  const bool stored = e.out_type == Element::s8 || e.out_type == Element::u8;
  const bool plain = stored && e.quantizer.plain && !e.quantizer.divide;
  const bool same = !e.real_sums && !e.zero_per_row && !e.w_zero && e.real == qfuse::Real::f32;
  if (!plain || !same) return false;
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
  Ints x[Vectors];
  Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
    const Floats y = __builtin_convertvector(bits<Ints>(totals[V]), Floats) * scale * c.scale[V];
    x[V] = nearest(step.apply_to_small(y + c.bias[V], V * kLanes, c.count - V * kLanes) * factor);
  });
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

}  // namespace
