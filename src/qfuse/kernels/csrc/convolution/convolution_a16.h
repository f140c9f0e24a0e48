// Weight-only convolutions: float activations times packed weights of four or eight bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "convolution/geometry.h"

namespace qfuse {

// The arguments; meanings and shapes: src/qfuse/kernels/weight_only_convolution.py.
struct WeightOnlyConvolution {
  const at::Tensor& x;
  const at::Tensor& w_packed;
  const at::Tensor& w_scale;
  const std::optional<at::Tensor>& w_zero_point;
  int64_t out_channels;
  const std::optional<at::Tensor>& bias;
  const std::vector<at::Tensor> extras;
  std::string_view steps;
  at::ScalarType compute;
  at::ScalarType out_dtype;
};

at::Tensor convolution_w4a16(const WeightOnlyConvolution& convolution, const Window& window);
at::Tensor convolution_w8a16(const WeightOnlyConvolution& convolution, const Window& window);

}  // namespace qfuse
