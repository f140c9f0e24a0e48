#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "result_memory.h"

namespace qfuse {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CPU);

at::ScalarType type_on_cpu(const at::TensorOptions& options) {
  TORCH_CHECK(options.device().is_cpu(), "results are on the CPU, not on ", options.device());
  return c10::typeMetaToScalarType(options.dtype());
}

}  // namespace

at::Tensor empty_tensor(at::IntArrayRef sizes, const at::TensorOptions& options,
                        at::MemoryFormat format) {
  return at::detail::empty_generic(sizes, result_allocator(), kKeys, type_on_cpu(options),
                                   format);
}

at::Tensor empty_strided_tensor(at::IntArrayRef sizes, at::IntArrayRef strides,
                                const at::TensorOptions& options) {
  return at::detail::empty_strided_generic(sizes, strides, result_allocator(), kKeys,
                                           type_on_cpu(options));
}

at::Tensor filled_tensor(at::IntArrayRef sizes, int64_t value, at::ScalarType type) {
  return at::full(sizes, value, type);
}

at::Tensor torch_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const std::optional<at::Tensor>& mask, bool causal, double scale) {
  const bool shared = query.size(1) != key.size(1);
  return at::scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale, shared);
}

at::Tensor padded_rows(const at::Tensor& x, int64_t zeros) {
  return at::constant_pad_nd(x, {0, zeros});
}

}  // namespace qfuse
