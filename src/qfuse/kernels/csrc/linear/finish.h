// From integer sums to the output: scales, bias, epilogue ops, conversion. See Epilogue.
#pragma once

#include "rowwise/steps.h"

namespace {

// The constants of adjacent output features.
template <int Vectors>
class Columns : public Span<Vectors> {
 public:
  QFUSE_INLINE Columns(const qfuse::Epilogue& e, int64_t column, int64_t columns)
      : Span<Vectors>{column, columns} {
    this->each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      const int64_t at = column + v * kLanes;
      if (e.w_scale) scale[v] = load<Floats>(e.w_scale + at, count);
      if (e.w_sums) sums[v] = load<Ints>(e.w_sums + at, count);
      if (e.w_zero) zero[v] = load<Ints>(e.w_zero + at, count);
      if (e.bias) bias[v] = load<Floats>(e.bias + at, count);
      if (e.x_zero && !e.zero_per_row) offset[v] = bits<Words>(sums[v]) * static_cast<uint32_t>(e.x_zero[0]);
    });
  }

  Floats scale[kVectors];
  Floats bias[kVectors] = {};
  Ints sums[kVectors];
  Ints zero[kVectors];
  Words offset[kVectors];  // the sums times the zero point, if all rows have the same
};

template <int Vectors>
QFUSE_INLINE void integer_totals(const qfuse::Epilogue& e, const Columns<Vectors>& c,
                                 const int32_t* sums, int64_t row, Floats* y) {
  const float scale = e.x_scale[e.scale_per_row ? row : 0];
  const uint32_t zero = e.zero_per_row ? e.x_zero[row] : 0;
  const uint32_t sum = e.w_zero ? e.x_sums[row] : 0;
  c.each([&](int64_t v, int64_t) QFUSE_LAMBDA {
    Words total = bits<Words>(load<Ints>(sums + v * kLanes, kLanes));
    total -= e.zero_per_row ? bits<Words>(c.sums[v]) * zero : c.offset[v];
    if (e.w_zero) total -= bits<Words>(c.zero[v]) * sum;
    y[v] = __builtin_convertvector(bits<Ints>(total), Floats) * scale;
  });
}

template <int Vectors>
QFUSE_INLINE void real_row(const qfuse::Epilogue& e, const Columns<Vectors>& c, const void* sums,
                           int64_t row, Floats* y) {
  if (e.real_sums) {
    c.each([&](int64_t v, int64_t) QFUSE_LAMBDA {
      y[v] = load<Floats>(static_cast<const float*>(sums) + v * kLanes, kLanes);
      if (e.x_scale) y[v] = y[v] * e.x_scale[e.scale_per_row ? row : 0];
    });
  } else {
    integer_totals(e, c, static_cast<const int32_t*>(sums), row, y);
  }
  c.each([&](int64_t v, int64_t) QFUSE_LAMBDA {
    if (e.w_scale) y[v] = y[v] * c.scale[v];
    if (e.bias) y[v] += c.bias[v];
    y[v] = rounded_to(e.real, y[v]);
  });
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
        return __builtin_convertvector(quantized<false>(e.quantizer, y), Bytes);
      });
  }
}

// Applies epilogue ops [first, last) to the vectors of a span.
template <int Vectors>
QFUSE_INLINE void apply_steps(const qfuse::Epilogue& e, int64_t first, int64_t last,
                              const Span<Vectors>& c, int64_t row, Floats* y) {
  for (int64_t s = first; s < last; ++s) apply(e.step[s], e.extra, c, row, y);
}

// Whether integer sums become quantized values without anything in between that differs by row.
inline bool only_quantizes(const qfuse::Epilogue& e) {
  const bool stored = e.out_type == qfuse::Element::s8 || e.out_type == qfuse::Element::u8;
  const bool plain = stored && e.quantizer.plain && !e.quantizer.divide;
  return plain && !e.real_sums && !e.zero_per_row && !e.w_zero && e.steps == 0 &&
         e.real == qfuse::Real::f32;
}

// The same operations as below, with all constants in registers.
template <int Vectors>
void quantize_columns(const qfuse::Epilogue& e, const int32_t* sums, int64_t row, int64_t rows,
                      int64_t column, int64_t columns) {
  const Columns<Vectors> c(e, column, columns);
  const qfuse::Quantizer q = e.quantizer;
  const Ints zero = broadcast(static_cast<int32_t>(q.zero));
  auto* out = static_cast<int8_t*>(e.out) + (row - e.out_row) * e.out_ld + column;
  for (int64_t i = 0; i < rows; ++i, sums += qfuse::kBlock, out += e.out_ld) {
    const float scale = e.x_scale[e.scale_per_row ? row + i : 0];
    c.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      const Words total = bits<Words>(load<Ints>(sums + v * kLanes, kLanes)) - c.offset[v];
      const Floats x = __builtin_convertvector(bits<Ints>(total), Floats) * scale * c.scale[v];
      // Without a bias this is x + 0, which quantizes to the same.
      const Floats y = clamp((x + c.bias[v]) * q.factor, q.least, q.most);
      store(out + v * kLanes, __builtin_convertvector(moved_nearest(y, zero), Bytes), count);
    });
  }
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

// Calls f(first column, columns) with a number of whole vectors as a constant, from all of them
// down to one by halves, and then for the rest, if there is one.
template <int Vectors = kVectors, class F>
QFUSE_INLINE void each_width(int64_t columns, const F& f, int64_t first = 0) {
  constexpr int64_t kColumns = Vectors * kLanes;
  while (columns - first >= kColumns) {
    f.template operator()<Vectors>(first, kColumns);
    first += kColumns;
  }
  if constexpr (Vectors > 1) {
    each_width<Vectors / 2>(columns, f, first);
  } else if (first < columns) {
    f.template operator()<0>(first, columns - first);
  }
}

void finish(const qfuse::Epilogue& e, const void* sums, int64_t row, int64_t rows, int64_t column,
            int64_t columns) {
  const auto* from = static_cast<const int32_t*>(sums);
  const bool simple = only_quantizes(e);
  each_width(columns, [&]<int Vectors>(int64_t first, int64_t count) {
    if (simple) {
      quantize_columns<Vectors>(e, from + first, row, rows, column + first, count);
    } else {
      finish_columns<Vectors>(e, from + first, row, rows, column + first, count);
    }
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
    low.each([&](int64_t v, int64_t)
                 QFUSE_LAMBDA { y[v] = rounded_to(e.product, y[v] * other[v]); });
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
