// int8 convolutions: quantized activations times packed int8 weights, with a fused epilogue.
#pragma once

#include <ATen/core/Tensor.h>

#include "convolution/geometry.h"
#include "linear/int8_operands.h"
#include "rowwise/quantizer.h"

namespace qfuse {

// Returns a float tensor, or quantized values if `output` is set. Meanings and shapes:
// src/qfuse/kernels/convolution_ops.py.
at::Tensor convolution_w8a8(const Int8Operands& operands, const Window& window,
                            const Output* output, at::ScalarType out_dtype);

// The same with a scale per group of input channels.
at::Tensor convolution_w8a8_grouped(const Int8Operands& operands, const Window& window,
                                    int64_t out_channels, const Output* output,
                                    at::ScalarType out_dtype);

}  // namespace qfuse
