// Weight-only int8 linears: real activations times packed int8 weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

namespace qfuse {

// Meanings and shapes: src/qfuse/kernels/ops.py.
at::Tensor linear_w8a16(const at::Tensor& x, const at::Tensor& w_packed, const at::Tensor& w_scale,
                        const std::optional<at::Tensor>& bias,
                        const std::vector<at::Tensor>& extras, std::string_view steps,
                        at::ScalarType out_dtype);

}  // namespace qfuse
