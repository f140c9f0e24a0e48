// From integer sums to the output: scales, bias, epilogue ops, conversion. See Epilogue.
#pragma once

#include "linear/quantize_columns.h"

namespace {

// What the totals of a row depend on besides the columns.
struct RowOfTotals {
  QFUSE_INLINE RowOfTotals(const qfuse::Epilogue& e, int64_t row)
      : scale(row_scale(e, row)),
        zero(e.zero_per_row ? e.x_zero[row] : 0),
        sum(e.w_zero ? e.x_sums[row] : 0) {}

  // A vector of totals times the scale of the row.
  template <int Vectors>
  QFUSE_INLINE Floats total(const qfuse::Epilogue& e, const Columns<Vectors>& c,
                            const int32_t* sums, int64_t v) const {
    Words total = bits<Words>(load<Ints>(sums + v * kLanes, kLanes));
    total -= e.zero_per_row ? bits<Words>(c.sums[v]) * zero : c.offset[v];
    if (e.w_zero) total -= bits<Words>(c.zero[v]) * sum;
    return __builtin_convertvector(bits<Ints>(total), Floats) * scale;
  }

  float scale;
  uint32_t zero;
  uint32_t sum;
};

template <int Vectors>
QFUSE_INLINE void real_row(const qfuse::Epilogue& e, const Columns<Vectors>& c, const void* sums,
                           int64_t row, Floats* y) {
  if (e.real_sums) {
    const auto* from = static_cast<const float*>(sums);
    const float scale = row_scale(e, row);
    c.each([&](int64_t v, int64_t)
               QFUSE_LAMBDA { y[v] = load<Floats>(from + v * kLanes, kLanes) * scale; });
  } else {
    const RowOfTotals of_row(e, row);
    const auto* from = static_cast<const int32_t*>(sums);
    c.each([&](int64_t v, int64_t) QFUSE_LAMBDA { y[v] = of_row.total(e, c, from, v); });
  }
  c.each([&](int64_t v, int64_t) QFUSE_LAMBDA {
    if (e.w_scale) y[v] = y[v] * c.scale[v];
    if (e.bias) y[v] += c.bias[v];
  });
  round_all(e.real, c, y);
}

template <int Vectors>
inline void write_row(const qfuse::Epilogue& e, const Columns<Vectors>& c, int64_t row,
                      const Floats* y) {
  const int64_t first = (row - e.out_row) * e.out_ld + c.column;
  const auto write = [&](auto* out, auto f) QFUSE_LAMBDA {
    c.each([&](int64_t v, int64_t count)
               QFUSE_LAMBDA { store(out + first + v * kLanes, f(y[v]), count); });
  };
  switch (e.out_type) {
    case qfuse::Element::f32:
      return write(static_cast<float*>(e.out), [](Floats y) { return y; });
    case qfuse::Element::bf16:
      return write(static_cast<uint16_t*>(e.out), [](Floats y) { return to_bf16(y); });
    case qfuse::Element::f16:
      return write(static_cast<uint16_t*>(e.out), [](Floats y) { return to_f16(y); });
    case qfuse::Element::s8:
    case qfuse::Element::u8:
      // The low byte of an in-range value is correct for int8 and uint8.
      return write(static_cast<int8_t*>(e.out), [&](Floats y) {
        return low_bytes(quantized<false>(e.quantizer, y));
      });
  }
}

// Applies epilogue ops [first, last) to the vectors of a span.
template <int Vectors>
QFUSE_INLINE void apply_steps(const qfuse::Epilogue& e, int64_t first, int64_t last,
                              const Span<Vectors>& c, int64_t row, Floats* y) {
  for (int64_t s = first; s < last; ++s) apply(e.step[s], e.extra, c, row, y);
}

template <int Vectors>
void finish_columns(const qfuse::Epilogue& e, const void* sums, int64_t row, int64_t rows,
                    int64_t column, int64_t columns) {
  static_assert(sizeof(float) == sizeof(int32_t));
  const Columns<Vectors> c(e, column, columns);
  Floats y[kVectors] = {};
  for (int64_t i = 0; i < rows; ++i) {
    real_row(e, c, static_cast<const int32_t*>(sums) + i * qfuse::kBlock, row + i, y);
    apply_steps(e, 0, e.steps, c, row + i, y);
    write_row(e, c, row + i, y);
  }
}

// A row of products in float32, before they are rounded.
template <int Vectors>
struct RowOfProducts {
  QFUSE_INLINE RowOfProducts(const qfuse::Epilogue& e, const Columns<Vectors>& c, int64_t row)
      : epilogue(e), columns(c), totals(e, row) {}

  QFUSE_INLINE Floats at(const int32_t* sums, int64_t v) const {
    return totals.total(epilogue, columns, sums, v) * columns.scale[v];
  }

  const qfuse::Epilogue& epilogue;
  const Columns<Vectors>& columns;
  RowOfTotals totals;
};

// The same of float sums, with scales of rows, of columns, of both or of none.
template <int Vectors>
struct RowOfRealProducts {
  QFUSE_INLINE RowOfRealProducts(const qfuse::Epilogue& e, const Columns<Vectors>& c, int64_t row)
      : scale(row_scale(e, row)), by_column(e.w_scale != nullptr), columns(c) {}

  QFUSE_INLINE Floats at(const float* sums, int64_t v) const {
    const Floats sum = load<Floats>(sums + v * kLanes, kLanes) * scale;
    return by_column ? sum * columns.scale[v] : sum;
  }

  float scale;
  bool by_column;
  const Columns<Vectors>& columns;
};

// finish_columns without epilogue ops, to floats of the type of the product: each vector passes
// through registers only.
template <int Vectors, class Row, class Sum, class Out, class Convert>
QFUSE_INLINE void write_products(const qfuse::Epilogue& e, const Sum* sums, int64_t row,
                                 int64_t rows, int64_t column, int64_t columns, Out* out,
                                 const Convert& convert) {
  const Columns<Vectors> c(e, column, columns);
  out += (row - e.out_row) * e.out_ld + column;
  for (int64_t i = 0; i < rows; ++i, sums += qfuse::kBlock, out += e.out_ld) {
    const Row products(e, c, row + i);
    c.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      Floats y = products.at(sums, v);
      if (e.bias) y += c.bias[v];
      store(out + v * kLanes, convert(y), count);
    });
  }
}

// Whether that is all that an epilogue does.
bool writes_products(const qfuse::Epilogue& e) {
  const bool scales = e.real_sums || e.w_scale != nullptr;
  return scales && e.steps == 0 && e.out_type < qfuse::Element::s8 &&
         static_cast<qfuse::Real>(e.out_type) == e.real;
}

template <int Vectors, class Row, class Sum>
void finish_products(const qfuse::Epilogue& e, const Sum* sums, int64_t row, int64_t rows,
                     int64_t column, int64_t columns) {
  const auto write = [&](auto* out, const auto& convert) QFUSE_LAMBDA {
    write_products<Vectors, Row>(e, sums, row, rows, column, columns, out, convert);
  };
  switch (e.real) {
    case qfuse::Real::f32:
      return write(static_cast<float*>(e.out), [](Floats y) QFUSE_LAMBDA { return y; });
    case qfuse::Real::bf16:
      return write(static_cast<uint16_t*>(e.out), [](Floats y) QFUSE_LAMBDA { return to_bf16(y); });
    case qfuse::Real::f16:
      return write(static_cast<uint16_t*>(e.out), [](Floats y) QFUSE_LAMBDA { return to_f16(y); });
  }
}

void finish(const qfuse::Epilogue& e, const void* sums, int64_t row, int64_t rows, int64_t column,
            int64_t columns) {
  const auto* from = static_cast<const int32_t*>(sums);
  const bool quantized = with_step(e, [&]<class Step>() {
    quantize_all<Step>(e, from, row, rows, column, columns);
    return true;
  });
  if (quantized || quantize_activation(e, from, row, rows, column, columns)) return;
  const bool plain = writes_products(e);
  each_width(columns, [&]<int Vectors>(int64_t first, int64_t count) {
    if (plain && e.real_sums) {
      return finish_products<Vectors, RowOfRealProducts<Vectors>>(
          e, static_cast<const float*>(sums) + first, row, rows, column + first, count);
    }
    if (plain) {
      return finish_products<Vectors, RowOfProducts<Vectors>>(e, from + first, row, rows,
                                                              column + first, count);
    }
    finish_columns<Vectors>(e, from + first, row, rows, column + first, count);
  });
}

template <int Vectors>
void finish_pair(const qfuse::Epilogue& e, const int32_t* first, const int32_t* second,
                 int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const Columns<Vectors> low(e, column, columns);
  const Columns<Vectors> high(e, e.half + column, columns);
  Floats y[kVectors] = {};
  Floats other[kVectors] = {};
  Floats* gate = e.up_first ? other : y;
  Floats* up = e.up_first ? y : other;
  for (int64_t i = 0; i < rows; ++i) {
    real_row(e, low, first + i * qfuse::kBlock, row + i, y);
    real_row(e, high, second + i * qfuse::kBlock, row + i, other);
    apply_steps(e, 0, e.front, low, row + i, y);
    apply_steps(e, 0, e.front, high, row + i, other);
    apply_steps(e, e.front, e.gate, low, row + i, gate);
    apply_steps(e, e.gate, e.up, low, row + i, up);
    low.each([&](int64_t v, int64_t) QFUSE_LAMBDA { y[v] = y[v] * other[v]; });
    round_all(e.product, low, y);
    apply_steps(e, e.up, e.steps, low, row + i, y);
    write_row(e, low, row + i, y);
  }
}

void finish_halves(const qfuse::Epilogue& e, const void* first, const void* second, int64_t row,
                   int64_t rows, int64_t column, int64_t columns) {
  const auto* low = static_cast<const int32_t*>(first);
  const auto* high = static_cast<const int32_t*>(second);
  if (columns == qfuse::kBlock) {
    return finish_pair<kVectors>(e, low, high, row, rows, column, columns);
  }
  finish_pair<0>(e, low, high, row, rows, column, columns);
}

}  // namespace
