// Quantization with static per-tensor scale and zero point.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernel_api.h"

namespace qfuse {

struct Output {
  const at::Tensor& scale;
  const std::optional<at::Tensor>& zero_point;
  int64_t quant_min;
  int64_t quant_max;
  bool reciprocal;
  bool zero_point_first;
};

// Throws if the range does not fit the quantized type.
void check_codes(at::ScalarType type, int64_t quant_min, int64_t quant_max);

// Computes in float32.
Quantizer quantizer_of(const Output& output, at::ScalarType type);

// Makes clamps at the end of an epilogue a part of the quantizer; results are the same bits.
void fold_clamps(Epilogue& epilogue);

}  // namespace qfuse
