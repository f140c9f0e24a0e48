// Operands of attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "kernel_api.h"
#include "linear/operands.h"

namespace qfuse {

// The four axes of an operand: batch, head, row and feature.
struct Operand {
  explicit Operand(const at::Tensor& x)
      : data(static_cast<const char*>(x.const_data_ptr())),
        type(real_of(x.scalar_type(), "an operand")),
        size(x.element_size()),
        batch(x.stride(0)),
        head(x.stride(1)),
        row(x.stride(2)),
        feature(x.stride(3)) {}

  OperandRows part(int64_t b, int64_t h, int64_t first, int64_t rows, int64_t column,
                   int64_t columns) const {
    const int64_t at = b * batch + h * head + first * row + column * feature;
    return {data + at * size, type, row, feature, rows, columns};
  }

  const char* data;
  Real type;
  int64_t size;  // of an element
  int64_t batch;
  int64_t head;
  int64_t row;
  int64_t feature;
};

// The mask as bool or float32, of the sizes of the scores and with adjacent columns. Axes that it
// broadcasts stay broadcast, but for the last one.
inline at::Tensor readable_mask(const at::Tensor& given, at::IntArrayRef sizes) {
  at::Tensor mask = given.expand(sizes);
  for (int64_t axis = 0; axis < mask.dim(); ++axis) {
    if (mask.stride(axis) == 0 && mask.size(axis) > 1) mask = mask.narrow(axis, 0, 1);
  }
  if (mask.scalar_type() != at::kBool) mask = mask.to(at::kFloat);
  std::vector<int64_t> wide = mask.sizes().vec();
  wide.back() = sizes.back();
  mask = mask.expand(wide);
  if (mask.stride(-1) != 1) mask = mask.contiguous();
  return mask.expand(sizes);
}

class Mask {
 public:
  Mask(const std::optional<at::Tensor>& given, at::IntArrayRef sizes) {
    if (given) mask_ = readable_mask(*given, sizes);
  }

  // Whether scores are scaled before the mask is added to them.
  bool adds() const { return mask_.defined() && mask_.scalar_type() != at::kBool; }

  // Lets scores be masked, of which these are the first row and key.
  void set(ScoreRows& s, int64_t batch, int64_t head, int64_t row, int64_t key) const {
    if (!mask_.defined()) return;
    const int64_t at =
        batch * mask_.stride(0) + head * mask_.stride(1) + row * mask_.stride(2) + key;
    s.mask = static_cast<const char*>(mask_.const_data_ptr()) + at * mask_.element_size();
    s.mask_ld = mask_.stride(2);
    s.is_bool = !adds();
  }

 private:
  at::Tensor mask_;  // [batch, heads, rows, keys]
};

}  // namespace qfuse
