// Attention of float values.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace qfuse {

// Meanings and shapes: src/qfuse/kernels/matmul_ops.py.
struct Attention {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const std::optional<at::Tensor>& mask;
  bool causal;
  double scale;
  at::IntArrayRef order;  // of batch, heads and rows in the memory of the result
};

at::Tensor attention(const Attention& a);

}  // namespace qfuse
