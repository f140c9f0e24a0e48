// Rowwise quantization for any instruction set: a row is read once and stays in the cache while it
// is normalized, reduced and quantized. See RowJob.
#pragma once

#include "rowwise/row_results.h"

namespace {

// Vectors of a span: their intermediate values stay in registers on every instruction set.
constexpr int kSpanVectors = kVectors < 4 ? kVectors : 4;
constexpr int64_t kSpan = kSpanVectors * kLanes;

// Calls f(span) for the spans of a row; only the last one may be shorter.
template <class F>
QFUSE_INLINE void each_span(int64_t columns, const F& f) {
  int64_t column = 0;
  for (; column + kSpan <= columns; column += kSpan) f(Span<kSpanVectors>{column, kSpan});
  if (column < columns) f(Span<0>{column, columns - column});
}

// Sums over a row.
template <int Count>
struct RowSums {
  float of[Count];
};

// Sums what f(span, parts) adds to `parts[c][v]` for the vectors v of a span, for `Count` sums c.
// They are sums of every 64th column, which are then added by halves.
template <int Count, class F>
QFUSE_INLINE RowSums<Count> sums_of(int64_t columns, const F& f) {
  Floats parts[Count][kVectors];
  Unrolled<kVectors / kSpanVectors>::run([&]<int S>() QFUSE_LAMBDA {
    Floats own[Count][kSpanVectors] = {};
    int64_t column = S * kSpan;
    for (; column + kSpan <= columns; column += qfuse::kBlock) {
      f(Span<kSpanVectors>{column, kSpan}, own);
    }
    // A copy: an array whose index is not a constant is not kept in registers.
    Floats last[Count][kSpanVectors];
    Unrolled<Count * kSpanVectors>::run([&]<int I>() QFUSE_LAMBDA {
      last[I / kSpanVectors][I % kSpanVectors] = own[I / kSpanVectors][I % kSpanVectors];
    });
    if (column < columns) f(Span<0>{column, columns - column}, last);
    Unrolled<Count * kSpanVectors>::run([&]<int I>() QFUSE_LAMBDA {
      parts[I / kSpanVectors][S * kSpanVectors + I % kSpanVectors] =
          last[I / kSpanVectors][I % kSpanVectors];
    });
  });
  RowSums<Count> sums;
  Unrolled<Count>::run(
      [&]<int C>() QFUSE_LAMBDA { sums.of[C] = reduced<kVectors>(parts[C], Sum()); });
  return sums;
}

// A term of the sum of a row's elements, or of their squares.
template <bool Square>
QFUSE_INLINE Floats term(Floats y) {
  return Square ? y * y : y;
}

// A row of a source.
template <qfuse::Element Type>
struct Elements {
  const void* data;
  int64_t first;
  qfuse::Real real;
  float scale = 1.0f;
  float zero = 0.0f;

  QFUSE_INLINE Elements(const qfuse::RowSource& x, int64_t row)
      : data(x.rows.data), first(row * x.rows.ld), real(x.real) {
    if (Type < qfuse::Element::s8) return;
    scale = x.scale[row * x.step];
    zero = x.zero[row * x.step];
  }

  QFUSE_INLINE Floats load_from(int64_t column, int64_t count) const {
    const int64_t at = first + column;
    if constexpr (Type < qfuse::Element::s8) {
      return load_real(data, static_cast<qfuse::Real>(Type), at, count);
    } else {
      const Bytes bytes = load<Bytes>(static_cast<const int8_t*>(data) + at, count);
      const Ints codes = Type == qfuse::Element::s8 ? widened(bytes) : widened_unsigned(bytes);
      const Floats y = rounded_to(real, (__builtin_convertvector(codes, Floats) - zero) * scale);
      // Missing elements are 0, as those of floats are: they take part in the sums of a norm.
      return first_of(y, count, 0.0f);
    }
  }
};

// Calls f with the type as a constant.
template <class F>
QFUSE_INLINE auto with_element(qfuse::Element type, const F& f) {
  switch (type) {
    case qfuse::Element::bf16:
      return f.template operator()<qfuse::Element::bf16>();
    case qfuse::Element::f16:
      return f.template operator()<qfuse::Element::f16>();
    case qfuse::Element::s8:
      return f.template operator()<qfuse::Element::s8>();
    case qfuse::Element::u8:
      return f.template operator()<qfuse::Element::u8>();
    default:
      return f.template operator()<qfuse::Element::f32>();
  }
}

// Adds a span of the residual to `y`. A function of its own: inlined, there would be one for each
// pair of types.
template <int Vectors>
__attribute__((noinline)) void add_residual(const qfuse::RowJob& job, int64_t row,
                                            Span<Vectors> span, Floats* y) {
  with_element(job.residual.rows.type, [&]<qfuse::Element Type>() QFUSE_LAMBDA {
    const Elements<Type> x(job.residual, row);
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      const Floats sum = y[v] + x.load_from(span.column + v * kLanes, count);
      y[v] = rounded_to(job.sum_type, sum);
    });
  });
}

// Writes the row plus its residual to `values`, padded with zeros; returns the sum of its terms.
template <qfuse::Element Type, bool Square>
float read_row(const qfuse::RowJob& job, int64_t row, float* values) {
  const Elements<Type> x(job.x, row);
  const auto sums = sums_of<1>(job.columns, [&](auto span, auto& parts) QFUSE_LAMBDA {
    Floats y[kSpanVectors] = {};
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      y[v] = x.load_from(span.column + v * kLanes, count);
    });
    if (job.residual.rows.data) add_residual(job, row, span, y);
    if (job.kept_sum) {
      span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
        const int64_t at = row * job.columns + span.column + v * kLanes;
        store_real(job.kept_sum, job.sum_type, at, y[v], count);
      });
    }
    span.each([&](int64_t v, int64_t) QFUSE_LAMBDA {
      parts[0][v] = parts[0][v] + term<Square>(y[v]);
      store(values + span.column + v * kLanes, y[v], kLanes);
    });
  });
  return sums.of[0];
}

// Subtracts `middle` from all values, and returns the sums of the differences and of their squares.
// Small differences are exact, so the first sum shows the rounding error of the middle.
RowSums<2> centre(float* values, int64_t columns, float middle) {
  return sums_of<2>(columns, [&](auto span, auto& parts) QFUSE_LAMBDA {
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      float* at = values + span.column + v * kLanes;
      const Floats y = first_of(load<Floats>(at, kLanes) - middle, count, 0.0f);
      parts[0][v] = parts[0][v] + y;
      parts[1][v] = parts[1][v] + y * y;
      store(at, y, kLanes);
    });
  });
}

// A row is normalized as (values - middle) * factor.
struct Normal {
  float middle;
  float factor;
};

// Reads a row, and returns the sum from which `normal_of` goes on.
template <qfuse::Element Type>
QFUSE_INLINE float read_sum(const qfuse::RowJob& job, int64_t row, float* values) {
  if (job.kind == qfuse::RowKind::rms_norm) return read_row<Type, true>(job, row, values);
  return read_row<Type, false>(job, row, values);
}

// The part of the mean square of differences from an inexact mean that its error may have.
constexpr float kMostError = 0x1p-6f;

// How a row that was read with this sum is normalized. A layer norm changes the values.
QFUSE_INLINE Normal normal_of(const qfuse::RowJob& job, float sum, float* values) {
  const float part = 1.0f / static_cast<float>(job.columns);
  if (job.kind == qfuse::RowKind::rms_norm) {
    return {0.0f, 1.0f / __builtin_sqrtf(sum * part + job.eps)};
  }
  RowSums<2> sums = centre(values, job.columns, sum * part);
  float middle = sums.of[0] * part;
  float square = sums.of[1] * part;
  // Where the differences are mainly the rounding error of the mean, or their squares overflow, a
  // second mean is nearer.
  if (!(middle * middle < square * kMostError)) {
    sums = centre(values, job.columns, sums.of[0] / static_cast<float>(job.columns));
    middle = sums.of[0] * part;
    square = sums.of[1] * part;
  }
  const float variance = square - middle * middle;
  return {middle, 1.0f / __builtin_sqrtf((variance < 0.0f ? 0.0f : variance) + job.eps)};
}

// Well below the magnitude from which floats lack halves, as `nearest` requires.
constexpr float kLeastUnrounded = 0x1p20f;

QFUSE_INLINE bool is_finite(float x) { return x - x == 0.0f; }

// Inner: the type that the normalized row is rounded to before the weight.
template <qfuse::Real Inner, qfuse::Real Real, class To>
void normalize_row(const qfuse::RowJob& job, int64_t row, Normal by, const float* values,
                   To to) {
  const float* const weight = job.weight;
  const float* const bias = job.bias;
  const KeptRow kept(job, row);
  auto columns = to.begin();
  each_span(job.columns, [&](auto span) QFUSE_LAMBDA {
    Floats y[kSpanVectors] = {};
    span.each([&](int64_t v, int64_t) QFUSE_LAMBDA {
      const Floats x = load<Floats>(values + span.column + v * kLanes, kLanes);
      y[v] = rounded_to(Inner, (x - by.middle) * by.factor);
    });
    if (weight) {
      span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
        y[v] = y[v] * load<Floats>(weight + span.column + v * kLanes, count);
      });
    }
    if (bias) {
      span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
        y[v] = y[v] + load<Floats>(bias + span.column + v * kLanes, count);
      });
    }
    span.each([&](int64_t v, int64_t) QFUSE_LAMBDA { y[v] = rounded_to(Real, y[v]); });
    columns.take(span, y);
    kept.take(Real, span, y);
  });
  columns.end();
}

// A row without a norm: from memory through the epilogue ops in registers.
template <qfuse::Element Type, class To>
void map_row(const qfuse::RowJob& job, int64_t row, To to) {
  const Elements<Type> x(job.x, row);
  const KeptRow kept(job, row);
  auto columns = to.begin();
  each_span(job.columns, [&](auto span) QFUSE_LAMBDA {
    Floats y[kSpanVectors] = {};
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      y[v] = x.load_from(span.column + v * kLanes, count);
    });
    for (int64_t s = 0; s < job.steps; ++s) apply(job.step[s], job.extra, span, row, y);
    columns.take(span, y);
    kept.take(job.kept_type, span, y);
  });
  columns.end();
}

// Computes rows from `first` on, each with the memory values_of(i), and gives them to to_of(i).
template <class ValuesOf, class ToOf>
QFUSE_INLINE void give_rows(const qfuse::RowJob& job, int64_t first, int64_t count,
                            const ValuesOf& values_of, const ToOf& to_of) {
  with_element(job.x.rows.type, [&]<qfuse::Element Type>() {
    if (job.kind == qfuse::RowKind::plain) {
      for (int64_t i = 0; i < count; ++i) map_row<Type>(job, first + i, to_of(i));
      return;
    }
    float sum = read_sum<Type>(job, first, values_of(0));
    for (int64_t i = 0; i < count; ++i) {
      const Normal by = normal_of(job, sum, values_of(i));
      // Sums are long chains of operations: the next row is read while those of this one end.
      if (i + 1 < count) sum = read_sum<Type>(job, first + i + 1, values_of(i + 1));
      with_type(job.inner, [&]<qfuse::Real Inner>() {
        with_type(job.real, [&]<qfuse::Real Real>() {
          normalize_row<Inner, Real>(job, first + i, by, values_of(i), to_of(i));
        });
      });
    }
  });
}

void compute_rows(const qfuse::RowJob& job, int64_t first, int64_t count, float* values,
                  int64_t ld, qfuse::Extremes* found) {
  const auto values_of = [&](int64_t i) { return values + i * ld; };
  const auto to_of = [&](int64_t i) { return WithExtremes{values_of(i), job.columns, found + i}; };
  give_rows(job, first, count, values_of, to_of);
}

void write_rows(const qfuse::RowJob& job, int64_t first, int64_t count, float* values, int64_t ld,
                const qfuse::Quantizer& q) {
  const auto values_of = [&](int64_t i) { return values + i % 2 * ld; };
  const auto to_of = [&](int64_t i) {
    return WithParameters{q, job.codes + (first + i) * job.columns};
  };
  give_rows(job, first, count, values_of, to_of);
}

// Quantizes finite values in float32. Clamping before rounding is equivalent, since the bounds are
// integers.
void encode_finite(const qfuse::RowJob& job, int64_t row, const float* values,
                   const qfuse::Quantizer& q) {
  int8_t* to = job.codes + row * job.columns;
  const float low = q.low - q.zero;
  const float high = q.high - q.zero;
  const auto zero = static_cast<int32_t>(q.zero);
  each_span(job.columns, [&](auto span) QFUSE_LAMBDA {
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      const int64_t at = span.column + v * kLanes;
      const Floats x = load<Floats>(values + at, kLanes) * q.factor;
      const Ints codes = nearest(lesser(::greater(x, broadcast(low)), broadcast(high))) + zero;
      // The low byte of an in-range value is correct for int8 and uint8.
      store(to + at, low_bytes(codes), count);
    });
  });
}

template <bool Rounding>
void encode_any(const qfuse::RowJob& job, int64_t row, const float* values,
                const qfuse::Quantizer& quantizer) {
  int8_t* to = job.codes + row * job.columns;
  each_span(job.columns, [&](auto span) QFUSE_LAMBDA {
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      const int64_t at = span.column + v * kLanes;
      const Ints codes = quantized<Rounding>(quantizer, load<Floats>(values + at, kLanes));
      store(to + at, low_bytes(codes), count);
    });
  });
}

void encode_row(const qfuse::RowJob& job, int64_t row, const float* values,
                const qfuse::Extremes& found, const qfuse::Quantizer& q) {
  if (q.type != qfuse::Real::f32) return encode_any<true>(job, row, values, q);
  const bool finite = is_finite(found.least) && is_finite(found.greatest) && is_finite(q.factor);
  const bool small = __builtin_fabsf(q.zero) < kLeastUnrounded;
  const bool whole = small && q.zero == static_cast<float>(static_cast<int32_t>(q.zero));
  const bool plain = !q.divide && !q.zero_first && whole;
  if (finite && plain) return encode_finite(job, row, values, q);
  encode_any<false>(job, row, values, q);
}

constexpr qfuse::RowKernels row_kernels{
    .compute = &compute_rows, .encode = &encode_row, .write = &write_rows, .requantize = &requantize};

}  // namespace
