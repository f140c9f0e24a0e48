// Stored activations: their zero points, and the names of types that results have.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernel_api.h"

namespace qfuse {

// The least number of the type: less this, zero points count from 0 as unsigned bytes do.
int32_t least_of(at::ScalarType type);

// Zero points less `least`, one per row.
at::Tensor row_zeros(const at::Tensor& zero_point, int64_t rows, int32_t least);

// The only zero point, 0 if there is none, less `least`.
int32_t only_zero(const std::optional<at::Tensor>& zero_point, int32_t least);

OutType out_type_of(at::ScalarType type);

}  // namespace qfuse
