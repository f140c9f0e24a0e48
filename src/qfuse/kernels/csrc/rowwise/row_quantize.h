// Rowwise quantization: norms and activations, quantized in the same pass over memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace qfuse {

// How rows are quantized, and the extra outputs. See src/qfuse/kernels/rowwise.py.
struct RowOutput {
  const std::optional<at::Tensor>& scale;
  const std::optional<at::Tensor>& zero_point;
  std::string_view formula;
  double eps;
  at::ScalarType scale_dtype;
  at::ScalarType zero_point_dtype;
  int64_t quant_min;
  int64_t quant_max;
  at::ScalarType dtype;
  at::ScalarType compute;
  bool reciprocal;
  bool zero_point_first;
  bool keep;
  bool keep_sum;
};

// Quantized values, scale, zero point, float result, sum; absent ones are empty.
using RowResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Computes `count` rows from `first` on into `to`, whose rows are `ld` apart.
using ComputeRows = std::function<void(int64_t first, int64_t count, float* to, int64_t ld)>;

// Quantizes rows of type `type` that `compute` produces. They are computed in strips of a multiple
// of `multiple` rows, so that a strip is still in the cache when its scales are computed.
// `compute` may be called by several threads at once.
RowResult quantize_rows(at::IntArrayRef shape, at::ScalarType type, const RowOutput& output,
                        int64_t multiple, const ComputeRows& compute);

// Floats, or 8-bit values with a scale and an optional zero point, each one number or one per row,
// which stand for floats of type `real`.
struct RowOperand {
  const at::Tensor& values;
  const std::optional<at::Tensor>& scale;
  const std::optional<at::Tensor>& zero_point;
  at::ScalarType real;
};

RowResult rms_norm_quantized(const RowOperand& x, const std::optional<RowOperand>& residual,
                             const std::optional<at::Tensor>& weight, double eps,
                             at::ScalarType inner, at::ScalarType float_dtype,
                             const RowOutput& output);

RowResult layer_norm_quantized(const RowOperand& x, const std::optional<RowOperand>& residual,
                               const std::optional<at::Tensor>& weight,
                               const std::optional<at::Tensor>& bias, double eps,
                               at::ScalarType float_dtype, const RowOutput& output);

RowResult activation_quantized(const RowOperand& x, const std::vector<at::Tensor>& extras,
                               std::string_view epilogue, at::ScalarType float_dtype,
                               const RowOutput& output);

}  // namespace qfuse
