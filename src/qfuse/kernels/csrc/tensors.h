// New tensors. The headers of torch's ops take longer to compile than all else that a kernel
// includes, so that tensors.cpp alone has them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace qfuse {

at::Tensor empty_tensor(at::IntArrayRef sizes, const at::TensorOptions& options,
                        at::MemoryFormat format = at::MemoryFormat::Contiguous);

at::Tensor empty_strided_tensor(at::IntArrayRef sizes, at::IntArrayRef strides,
                                const at::TensorOptions& options);

at::Tensor filled_tensor(at::IntArrayRef sizes, int64_t value, at::ScalarType type);

// torch's scaled_dot_product_attention.
at::Tensor torch_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const std::optional<at::Tensor>& mask, bool causal, double scale);

// With so many zeros after the last elements of each row.
at::Tensor padded_rows(const at::Tensor& x, int64_t zeros);

}  // namespace qfuse
