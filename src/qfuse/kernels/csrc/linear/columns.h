// The constants that an epilogue has for each output feature.
#pragma once

#include "rowwise/clamped_store.h"

namespace {

// The scale of a row of x; one without scales.
QFUSE_INLINE float row_scale(const qfuse::Epilogue& e, int64_t row) {
  return e.x_scale ? e.x_scale[e.scale_per_row ? row : 0] : 1.0f;
}

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

}  // namespace
