// Quantized activations: their zero points, and the names of result types.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernel_api.h"

namespace qfuse {

// The minimum of the type; relative to it, zero points start at 0 like unsigned bytes.
int32_t least_of(at::ScalarType type);

// Zero points minus `least` and `shift`, one per row; `what` is the name of the argument.
at::Tensor row_zeros(const at::Tensor& zero_point, int64_t rows, int32_t least, int32_t shift = 0,
                     const char* what = "x_zero_point");

// The single zero point, 0 if there is none, minus `least` and `shift`.
int32_t only_zero(const std::optional<at::Tensor>& zero_point, int32_t least, int32_t shift = 0,
                  const char* what = "x_zero_point");

// The kernel's name of a type of elements. Throws for other types; `what` is the tensor's name.
Element element_of(at::ScalarType type, const char* what);

// The bytes of an element.
int64_t bytes_of(Element type);

}  // namespace qfuse
