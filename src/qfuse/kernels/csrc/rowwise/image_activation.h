// Epilogue ops on images that are joined along their channels, quantized in the same pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "rowwise/quantizer.h"

namespace qfuse {

// Meanings and shapes: src/qfuse/kernels/image_activation.py.
struct ImageActivation {
  const std::vector<at::Tensor>& parts;
  const std::optional<at::Tensor>& scale;
  const std::optional<at::Tensor>& zero_point;
  const std::vector<at::Tensor>& extras;
  std::string_view epilogue;
};

at::Tensor image_activation_quantized(const ImageActivation& activation, const Output& output,
                                      at::ScalarType out_dtype);

}  // namespace qfuse
