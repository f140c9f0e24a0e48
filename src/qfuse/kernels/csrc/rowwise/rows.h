// Rowwise quantization for any instruction set: a row is read once and stays in the cache while it
// is normalized, reduced and quantized. See RowJob.
#pragma once

#include "rowwise/requantize.h"

namespace {

// Calls f(span) for the spans of a row, all but the last of 64 columns.
template <class F>
QFUSE_INLINE void each_span(int64_t columns, F f) {
  int64_t column = 0;
  for (; column + qfuse::kBlock <= columns; column += qfuse::kBlock) {
    f(Span<kVectors>{column, qfuse::kBlock});
  }
  if (column < columns) f(Span<0>{column, columns - column});
}

QFUSE_INLINE float sum_of(const Floats* parts) {
  float sum = 0.0f;
  for (int64_t v = 0; v < kVectors; ++v) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += parts[v][lane];
  }
  return sum;
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
      Floats y = rounded_to(real, (__builtin_convertvector(codes, Floats) - zero) * scale);
      // Missing elements are 0, as those of floats are: they take part in the sums of a norm.
      for (int64_t lane = count; lane < kLanes; ++lane) y[lane] = 0.0f;
      return y;
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
  Floats parts[kVectors] = {};
  each_span(job.columns, [&](auto span) QFUSE_LAMBDA {
    Floats y[kVectors] = {};
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
      parts[v] = parts[v] + term<Square>(y[v]);
      store(values + span.column + v * kLanes, y[v], kLanes);
    });
  });
  return sum_of(parts);
}

// Subtracts `middle` from all values, pads with zeros, and returns the sum of the differences.
// Small differences are exact, so the sum shows the rounding error of the middle.
float centre(float* values, int64_t columns, float middle) {
  Floats parts[kVectors] = {};
  each_span(columns, [&](auto span) QFUSE_LAMBDA {
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      float* at = values + span.column + v * kLanes;
      Floats y = load<Floats>(at, kLanes) - middle;
      for (int64_t lane = count; lane < kLanes; ++lane) y[lane] = 0.0f;
      parts[v] = parts[v] + y;
      store(at, y, kLanes);
    });
  });
  return sum_of(parts);
}

// The sum of squares of (values - middle).
float squares(const float* values, int64_t columns, float middle) {
  Floats parts[kVectors] = {};
  each_span(columns, [&](auto span) QFUSE_LAMBDA {
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      const Floats y = load<Floats>(values + span.column + v * kLanes, kLanes) - middle;
      if (count == kLanes) {
        parts[v] = parts[v] + y * y;
      } else {
        for (int64_t lane = 0; lane < count; ++lane) parts[v][lane] += y[lane] * y[lane];
      }
    });
  });
  return sum_of(parts);
}

// A row is normalized as (values - middle) * factor.
struct Normal {
  float middle;
  float factor;
};

// Reads a row and computes how it is normalized.
template <qfuse::Element Type>
Normal read_normal(const qfuse::RowJob& job, int64_t row, float* values) {
  const auto n = static_cast<float>(job.columns);
  if (job.kind == qfuse::RowKind::rms_norm) {
    const float variance = read_row<Type, true>(job, row, values) / n;
    return {0.0f, 1.0f / __builtin_sqrtf(variance + job.eps)};
  }
  const float nearly = read_row<Type, false>(job, row, values) / n;
  const float middle = centre(values, job.columns, nearly) / n;
  const float variance = squares(values, job.columns, middle) / n;
  return {middle, 1.0f / __builtin_sqrtf(variance + job.eps)};
}

// Running minimum and maximum; non-finite values make `odd` NaN.
struct Bounds {
  Floats least = Floats{} + __builtin_inff();
  Floats greatest = Floats{} - __builtin_inff();
  Floats odd = {};

  QFUSE_INLINE void take(Floats y, int64_t count) {
    // Missing lanes repeat a valid one.
    for (int64_t lane = count; lane < kLanes; ++lane) y[lane] = y[0];
    least = lesser(y, least);
    greatest = ::greater(y, greatest);
    odd = fused(y, Floats{}, odd);
  }
};

// Well below the magnitude from which floats lack halves, as `nearest` requires.
constexpr float kLeastUnrounded = 0x1p20f;

QFUSE_INLINE bool is_finite(float x) { return x - x == 0.0f; }

// A row's minimum and maximum if it contains a NaN or an infinity.
qfuse::Extremes exact_extremes(const float* values, int64_t columns) {
  qfuse::Extremes found{__builtin_inff(), -__builtin_inff()};
  for (int64_t k = 0; k < columns; ++k) {
    if (values[k] != values[k]) return {values[k], values[k]};
    found.least = values[k] < found.least ? values[k] : found.least;
    found.greatest = values[k] > found.greatest ? values[k] : found.greatest;
  }
  return found;
}

qfuse::Extremes extremes(const Bounds* bounds, const float* values, int64_t columns) {
  qfuse::Extremes found{__builtin_inff(), -__builtin_inff()};
  for (int64_t v = 0; v < kVectors; ++v) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (bounds[v].odd[lane] != 0.0f) return exact_extremes(values, columns);
      found.least = bounds[v].least[lane] < found.least ? bounds[v].least[lane] : found.least;
      found.greatest =
          bounds[v].greatest[lane] > found.greatest ? bounds[v].greatest[lane] : found.greatest;
    }
  }
  return found;
}

// Applies the epilogue ops to a span, updates the extremes and stores it.
template <int Vectors>
QFUSE_INLINE void finish_span(const qfuse::RowJob& job, const Span<Vectors>& span, int64_t row,
                              Floats* y, float* values, Bounds* bounds) {
  for (int64_t s = 0; s < job.steps; ++s) apply(job.step[s], job.extra, span, row, y);
  span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
    bounds[v].take(y[v], count);
    store(values + span.column + v * kLanes, y[v], kLanes);
  });
  if (job.kept) {
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      const int64_t at = row * job.columns + span.column + v * kLanes;
      store_real(job.kept, job.kept_type, at, y[v], count);
    });
  }
}

// Inner: the type that the normalized row is rounded to before the weight.
template <qfuse::Real Inner, qfuse::Real Real>
void normalize_row(const qfuse::RowJob& job, int64_t row, const Normal& by, float* values,
                   Bounds* bounds) {
  each_span(job.columns, [&](auto span) QFUSE_LAMBDA {
    Floats y[kVectors] = {};
    span.each([&](int64_t v, int64_t) QFUSE_LAMBDA {
      const Floats x = load<Floats>(values + span.column + v * kLanes, kLanes);
      y[v] = rounded_to(Inner, (x - by.middle) * by.factor);
    });
    if (job.weight) {
      span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
        y[v] = y[v] * load<Floats>(job.weight + span.column + v * kLanes, count);
      });
    }
    if (job.bias) {
      span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
        y[v] = y[v] + load<Floats>(job.bias + span.column + v * kLanes, count);
      });
    }
    span.each([&](int64_t v, int64_t) QFUSE_LAMBDA { y[v] = rounded_to(Real, y[v]); });
    finish_span(job, span, row, y, values, bounds);
  });
}

// A row without a norm: from memory through the epilogue ops in registers.
template <qfuse::Element Type>
void map_row(const qfuse::RowJob& job, int64_t row, float* values, Bounds* bounds) {
  const Elements<Type> x(job.x, row);
  each_span(job.columns, [&](auto span) QFUSE_LAMBDA {
    Floats y[kVectors] = {};
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      y[v] = x.load_from(span.column + v * kLanes, count);
    });
    finish_span(job, span, row, y, values, bounds);
  });
}

qfuse::Extremes compute_row(const qfuse::RowJob& job, int64_t row, float* values) {
  Bounds bounds[kVectors];
  if (job.kind == qfuse::RowKind::plain) {
    with_element(job.x.rows.type,
                 [&]<qfuse::Element Type>() { map_row<Type>(job, row, values, bounds); });
  } else {
    const Normal by = with_element(job.x.rows.type, [&]<qfuse::Element Type>() {
      return read_normal<Type>(job, row, values);
    });
    with_type(job.inner, [&]<qfuse::Real Inner>() {
      with_type(job.real, [&]<qfuse::Real Real>() {
        normalize_row<Inner, Real>(job, row, by, values, bounds);
      });
    });
  }
  return extremes(bounds, values, job.columns);
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
      store(to + at, __builtin_convertvector(codes, Bytes), count);
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
      store(to + at, __builtin_convertvector(codes, Bytes), count);
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
    .compute = &compute_row, .encode = &encode_row, .requantize = &requantize};

}  // namespace
