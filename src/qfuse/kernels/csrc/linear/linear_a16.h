// Weight-only linears: float activations times packed weights of 4, 8 or 16 bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

namespace qfuse {

// The arguments; meanings and shapes: src/qfuse/kernels/weight_only.py.
struct WeightOnlyLinear {
  const at::Tensor& x;
  const at::Tensor& w_packed;
  const at::Tensor& w_scale;
  const std::optional<at::Tensor>& w_zero_point;
  const std::optional<at::Tensor>& w_offset;
  int64_t out_features;
  const std::optional<at::Tensor>& bias;
  const std::vector<at::Tensor>& extras;
  std::string_view steps;
  at::ScalarType compute;
  at::ScalarType out_dtype;
};

at::Tensor linear_w4a16(const WeightOnlyLinear& linear);
at::Tensor linear_w8a16(const WeightOnlyLinear& linear);
at::Tensor linear_w16a32(const WeightOnlyLinear& linear);

}  // namespace qfuse
