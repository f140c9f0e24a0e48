// Packed weights of four or eight bits that multiply float activations.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "kernel_api.h"

namespace qfuse {

// The arguments; meanings and shapes: src/qfuse/kernels/weight_only.py.
struct RealWeightArguments {
  const at::Tensor& packed;
  const at::Tensor& scale;
  const std::optional<at::Tensor>& zero_point;
  const std::optional<at::Tensor>& offset;
  at::ScalarType compute;
};

// The packed weight and its parameters, padded to all features of the last block.
struct RealWeight {
  int64_t bits;
  int64_t n;
  int64_t words;   // 32-bit words per feature
  int64_t groups;
  bool whole;  // one group without offsets: the epilogue scales
  Real compute;
  Real real;
  at::Tensor codes;
  at::Tensor scale;
  at::Tensor zero;    // undefined if absent
  at::Tensor offset;  // undefined if absent

  int64_t codes_per_word() const { return 32 / bits; }
  int64_t depth() const { return words * codes_per_word(); }
  int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
  int64_t columns(int64_t block) const { return std::min(kBlock, n - block * kBlock); }
  // A block from a word on, which begins a group.
  RealBlock block(int64_t index, int64_t word = 0) const;
};

// Checks the arguments. `k` counts the weights of a feature, which fill `words`; `real` is the type
// of the activation.
RealWeight real_weight_of(const RealWeightArguments& arguments, int64_t bits, int64_t n, int64_t k,
                          int64_t words, at::ScalarType real);

// The type of tensors that are multiplied as `type`.
at::ScalarType scalar_type(Real type);

}  // namespace qfuse
