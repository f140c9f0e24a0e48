// Batch axes of operands, which broadcast to those of a result.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace qfuse {

// All axes but the last two.
std::vector<int64_t> batch_of(const at::Tensor& tensor);

// `batch`, and two more axes.
std::vector<int64_t> shape_of(std::vector<int64_t> batch, int64_t rows, int64_t columns);

// The batch axes of the product of two operands: all axes but the last two, after broadcasting.
std::vector<int64_t> broadcast_batch(at::IntArrayRef x, at::IntArrayRef other);

// Whether a tensor of the shape `from` broadcasts to `to`.
bool broadcasts_to(at::IntArrayRef from, at::IntArrayRef to);

// Where the entries of `batch` are in an operand whose own batch axes have these sizes and strides,
// in row-major order. Axes of one index are repeated.
std::vector<int64_t> offsets_of(at::IntArrayRef batch, at::IntArrayRef sizes,
                                at::IntArrayRef strides);

// The strides of contiguous axes.
std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes);

}  // namespace qfuse
