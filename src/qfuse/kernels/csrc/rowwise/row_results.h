// Where the rows of a RowJob go, for any instruction set: begin() opens a row, whose spans are taken in
// order.
#pragma once

#include "isa/reduce.h"
#include "rowwise/requantize.h"

namespace {

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

// Writes a row to `values`, and its minimum and maximum to `found`; non-finite values make `odd` NaN.
struct WithExtremes {
  float* values;
  int64_t columns;
  qfuse::Extremes* found;

  struct Columns {
    float* values;
    int64_t columns;
    qfuse::Extremes* found;
    Floats least = Floats{} + __builtin_inff();
    Floats greatest = Floats{} - __builtin_inff();
    Floats odd = {};

    template <int Vectors>
    QFUSE_INLINE void take(const Span<Vectors>& span, const Floats* y) {
      span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
        store(values + span.column + v * kLanes, y[v], kLanes);
        // Missing lanes repeat a valid one.
        const Floats x = first_of(y[v], count, y[v][0]);
        least = lesser(x, least);
        greatest = ::greater(x, greatest);
        odd = fused(x, Floats{}, odd);
      });
    }

    QFUSE_INLINE void end() {
      if (reduced<1>(&odd, Sum()) != 0.0f) {
        *found = exact_extremes(values, columns);
      } else {
        *found = {reduced<1>(&least, Lesser()), reduced<1>(&greatest, Greater())};
      }
    }
  };

  QFUSE_INLINE Columns begin() const { return {values, columns, found}; }
};

// Quantizes a row by parameters that are known before.
struct WithParameters {
  const qfuse::Quantizer& quantizer;
  int8_t* row;

  // With a copy, which stays in registers: a store of bytes could change the original.
  struct Columns {
    qfuse::Quantizer quantizer;
    int8_t* row;

    template <int Vectors>
    QFUSE_INLINE void take(const Span<Vectors>& span, const Floats* y) const {
      span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
        const Ints codes = quantized_plain(quantizer, y[v]);
        store(row + span.column + v * kLanes, low_bytes(codes), count);
      });
    }

    QFUSE_INLINE void end() const {}
  };

  QFUSE_INLINE Columns begin() const { return {quantizer, row}; }
};

// The float result of a row, if it is kept.
struct KeptRow {
  void* data;
  int64_t first;

  QFUSE_INLINE KeptRow(const qfuse::RowJob& job, int64_t row)
      : data(job.kept), first(row * job.columns) {}

  template <int Vectors>
  QFUSE_INLINE void take(qfuse::Real type, const Span<Vectors>& span, const Floats* y) const {
    if (!data) return;
    span.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      store_real(data, type, first + span.column + v * kLanes, y[v], count);
    });
  }
};

}  // namespace
