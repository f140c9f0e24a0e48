// Packed weights of 4, 8 or 16 bits that multiply float activations.
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

// The format of a packed weight. `bits` are those that the op is named after.
Format format_of(const at::Tensor& packed, int64_t bits);

constexpr int64_t codes_per_word(Format format) {
  return format == Format::four ? 8 : format == Format::half ? 2 : 4;
}

// Words of a feature with `k` weights: whole groups of four.
constexpr int64_t words_of(int64_t k, Format format) {
  if (format == Format::half) return (k + kGroup - 1) / kGroup * 2;
  const int64_t codes = codes_per_word(format);
  return (k + codes - 1) / codes;
}

const CodeKernels& kernels_for(const Path& path, Format format);

// The packed weight and its parameters, padded to all features of the last block.
struct RealWeight {
  Format format;
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

  int64_t codes_per_word() const { return qfuse::codes_per_word(format); }
  int64_t depth() const { return words * codes_per_word(); }
  int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
  int64_t columns(int64_t block) const { return std::min(kBlock, n - block * kBlock); }
  // A block from a word on, which begins a group.
  RealBlock block(int64_t index, int64_t word = 0) const;
};

// Checks the arguments. `k` counts the weights of a feature, which fill `words`; `real` is the type
// of the activation.
RealWeight real_weight_of(const RealWeightArguments& arguments, Format format, int64_t n,
                          int64_t k, int64_t words, at::ScalarType real);

// The type of tensors that are multiplied as `type`.
at::ScalarType scalar_type(Real type);

}  // namespace qfuse
