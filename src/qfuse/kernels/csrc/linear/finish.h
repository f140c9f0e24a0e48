// From integer sums to the output: scales, bias, epilogue ops, conversion. See Epilogue.
#pragma once

#include "rowwise/steps.h"

namespace {

// The constants of one block of output features.
template <bool Whole>
class Columns : public Span<Whole> {
 public:
  Columns(const qfuse::Epilogue& e, int64_t column, int64_t columns)
      : Span<Whole>{column, columns} {
    this->each([&](int64_t v, int64_t count) {
      const int64_t at = column + v * kLanes;
      if (e.w_scale) scale[v] = load<Floats>(e.w_scale + at, count);
      if (e.w_sums) sums[v] = load<Ints>(e.w_sums + at, count);
      if (e.w_zero) zero[v] = load<Ints>(e.w_zero + at, count);
      if (e.bias) bias[v] = load<Floats>(e.bias + at, count);
    });
  }

  Floats scale[kVectors];
  Floats bias[kVectors];
  Ints sums[kVectors];
  Ints zero[kVectors];
};

template <bool Whole>
QFUSE_INLINE void integer_totals(const qfuse::Epilogue& e, const Columns<Whole>& c,
                                 const int32_t* sums, int64_t row, Floats* y) {
  const float scale = e.x_scale[e.scale_per_row ? row : 0];
  const uint32_t zero = e.x_zero[e.zero_per_row ? row : 0];
  const uint32_t sum = e.w_zero ? e.x_sums[row] : 0;
  c.each([&](int64_t v, int64_t) {
    Words total =
        bits<Words>(load<Ints>(sums + v * kLanes, kLanes)) - bits<Words>(c.sums[v]) * zero;
    if (e.w_zero) total -= bits<Words>(c.zero[v]) * sum;
    y[v] = __builtin_convertvector(bits<Ints>(total), Floats) * scale;
  });
}

template <bool Whole>
QFUSE_INLINE void real_row(const qfuse::Epilogue& e, const Columns<Whole>& c, const void* sums,
                           int64_t row, Floats* y) {
  if (e.real_sums) {
    c.each([&](int64_t v, int64_t) {
      y[v] = load<Floats>(static_cast<const float*>(sums) + v * kLanes, kLanes);
      if (e.x_scale) y[v] = y[v] * e.x_scale[e.scale_per_row ? row : 0];
    });
  } else {
    integer_totals(e, c, static_cast<const int32_t*>(sums), row, y);
  }
  c.each([&](int64_t v, int64_t) {
    if (e.w_scale) y[v] = y[v] * c.scale[v];
    if (e.bias) y[v] += c.bias[v];
    y[v] = rounded_to(e.real, y[v]);
  });
}

template <bool Whole>
inline void write_row(const qfuse::Epilogue& e, const Columns<Whole>& c, int64_t row,
                      const Floats* y) {
  const int64_t first = (row - e.out_row) * e.out_ld + c.column;
  const auto write = [&](auto* out, auto f) QFUSE_LAMBDA {
    c.each([&](int64_t v, int64_t count)
               QFUSE_LAMBDA { store(out + first + v * kLanes, f(y[v]), count); });
  };
  switch (e.out_type) {
    case qfuse::OutType::f32:
      return write(static_cast<float*>(e.out), [](Floats y) { return y; });
    case qfuse::OutType::bf16:
      return write(static_cast<uint16_t*>(e.out), [](Floats y) { return to_bf16(y); });
    case qfuse::OutType::f16:
      return write(static_cast<uint16_t*>(e.out), [](Floats y) { return to_f16(y); });
    case qfuse::OutType::s8:
    case qfuse::OutType::u8:
      // The low byte of an in-range value is correct for int8 and uint8.
      return write(static_cast<int8_t*>(e.out), [&](Floats y) {
        return __builtin_convertvector(quantized<false>(e.quantizer, y), Bytes);
      });
  }
}

// Applies epilogue ops [first, last) to the vectors of a span.
template <bool Whole>
QFUSE_INLINE void apply_steps(const qfuse::Epilogue& e, int64_t first, int64_t last,
                              const Span<Whole>& c, int64_t row, Floats* y) {
  for (int64_t s = first; s < last; ++s) apply<Whole>(e.step[s], e.extra, c, row, y);
}

template <bool Whole>
void finish_block(const qfuse::Epilogue& e, const void* sums, int64_t row, int64_t rows,
                  int64_t column, int64_t columns) {
  static_assert(sizeof(float) == sizeof(int32_t));
  const Columns<Whole> c(e, column, columns);
  Floats y[kVectors] = {};
  for (int64_t i = 0; i < rows; ++i) {
    real_row(e, c, static_cast<const int32_t*>(sums) + i * qfuse::kBlock, row + i, y);
    apply_steps(e, 0, e.steps, c, row + i, y);
    write_row(e, c, row + i, y);
  }
}

void finish(const qfuse::Epilogue& e, const void* sums, int64_t row, int64_t rows, int64_t column,
            int64_t columns) {
  if (columns == qfuse::kBlock) return finish_block<true>(e, sums, row, rows, column, columns);
  finish_block<false>(e, sums, row, rows, column, columns);
}

template <bool Whole>
void finish_pair(const qfuse::Epilogue& e, const int32_t* first, const int32_t* second,
                 int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const Columns<Whole> low(e, column, columns);
  const Columns<Whole> high(e, e.half + column, columns);
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
    return finish_pair<true>(e, low, high, row, rows, column, columns);
  }
  finish_pair<false>(e, low, high, row, rows, column, columns);
}

}  // namespace
