// Linears of quantized activations with groupwise weight scales along K.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "rowwise/quantizer.h"
#include "rowwise/row_quantize.h"

namespace qfuse {

enum class WeightBits { four, eight };

// The arguments of these linears. Meanings and shapes: src/qfuse/kernels/grouped_ops.py.
struct GroupedLinear {
  WeightBits bits;
  const at::Tensor& x;
  const at::Tensor& x_scale;
  const std::optional<at::Tensor>& x_zero_point;
  const at::Tensor& w_packed;
  const at::Tensor& w_sums;
  const at::Tensor& w_scale;
  const std::optional<at::Tensor>& w_zero_point;
  int64_t features;
  const std::optional<at::Tensor>& bias;
  const std::vector<at::Tensor> extras;
  std::string_view epilogue;
  at::ScalarType product_dtype;
};

// Returns a float tensor, or quantized values if `output` is set.
at::Tensor linear_grouped(const GroupedLinear& linear, const Output* output,
                          at::ScalarType out_dtype);

// Returns rowwise quantized values of the float result, whose type is `float_dtype`.
RowResult linear_grouped_rows(const GroupedLinear& linear, at::ScalarType float_dtype,
                              const RowOutput& output);

}  // namespace qfuse
