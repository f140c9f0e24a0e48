// int8 linears: quantized activations times packed int8 weights, with a fused epilogue.
#pragma once

#include <ATen/core/Tensor.h>

#include "linear/int8_operands.h"
#include "rowwise/quantizer.h"
#include "rowwise/row_quantize.h"

namespace qfuse {

// Returns a float tensor, or quantized values if `output` is set.
at::Tensor linear_w8a8(const Int8Operands& linear, const Output* output, at::ScalarType out_dtype);

// Returns rowwise quantized values of the float result, whose type is `float_dtype`.
RowResult linear_w8a8_rows(const Int8Operands& linear, at::ScalarType float_dtype,
                           const RowOutput& output);

}  // namespace qfuse
