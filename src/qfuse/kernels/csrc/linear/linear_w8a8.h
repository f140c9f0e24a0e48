// int8 linears: quantized activations times packed int8 weights, with a fused epilogue.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "rowwise/quantizer.h"
#include "rowwise/row_quantize.h"

namespace qfuse {

// The arguments that all int8 linears have. Meanings and shapes: src/qfuse/kernels/ops.py.
struct Linear {
  const at::Tensor& x;
  const at::Tensor& x_scale;
  const std::optional<at::Tensor>& x_zero_point;
  const at::Tensor& w_packed;
  const at::Tensor& w_sums;
  const at::Tensor& w_scale;
  const std::optional<at::Tensor>& w_zero_point;
  const std::optional<at::Tensor>& bias;
  const std::vector<at::Tensor> extras;
  std::string_view epilogue;
  at::ScalarType real;
};

// Returns a float tensor, or quantized values if `output` is set.
at::Tensor linear_w8a8(const Linear& linear, const Output* output, at::ScalarType out_dtype);

// Returns rowwise quantized values of the float result, whose type is `float_dtype`.
RowResult linear_w8a8_rows(const Linear& linear, at::ScalarType float_dtype,
                           const RowOutput& output);

}  // namespace qfuse
