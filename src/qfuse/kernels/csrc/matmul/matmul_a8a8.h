// int8 products of two activations, with a fused epilogue.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "rowwise/quantizer.h"

namespace qfuse {

struct StoredOperand {
  const at::Tensor& values;
  const at::Tensor& scale;
  const std::optional<at::Tensor>& zero_point;
};

// Meanings and shapes: src/qfuse/kernels/matmul_ops.py.
struct Matmul {
  const StoredOperand x;
  const StoredOperand other;
  const std::vector<at::Tensor> extras;
  std::string_view epilogue;
  at::ScalarType product_dtype;
};

// Returns a float tensor, or quantized values if `output` is set.
at::Tensor matmul_a8a8(const Matmul& matmul, const Output* output, at::ScalarType out_dtype);

}  // namespace qfuse
