// The operands that all products of quantized activations and int8 weights share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "kernel_api.h"

namespace qfuse {

// Meanings and shapes: src/qfuse/kernels/ops.py.
struct Int8Operands {
  const at::Tensor& x;
  const at::Tensor& x_scale;
  const std::optional<at::Tensor>& x_zero_point;
  const at::Tensor& w_packed;
  const at::Tensor& w_sums;
  const at::Tensor& w_scale;
  const std::optional<at::Tensor>& w_zero_point;
  const std::optional<at::Tensor>& bias;
  const std::vector<at::Tensor> extras;
  std::string_view epilogue;
  at::ScalarType product_dtype;
};

// Products of 8-bit integers that a sum in int32 holds: 255 * 128 * 2^16 is below 2^31, and where
// both operands have zero points, 255 * 255 * 2^15. As in src/qfuse/kernels/accumulator.py.
constexpr int64_t max_depth(bool two_zero_points) {
  return int64_t{1} << (two_zero_points ? 15 : 16);
}

// Checks the type of `x`, and that int32 sums over `k` products are exact.
void check_int8(const Int8Operands& o, int64_t k);

// What makes unsigned bytes of signed ones, and the reverse.
constexpr uint32_t kSignBits = 0x80808080u;

// What makes unsigned bytes of those of `x`.
uint32_t flip_of(const at::Tensor& x);

// Copies bytes, with such a flip or none.
void copy_flipped(const uint8_t* from, int64_t count, uint32_t flip, uint8_t* to);

// 128 if a path multiplies bytes with a flip as signed ones, else 0: what unsigned bytes and their
// zero points are above them.
int32_t shift_of(uint32_t flip, const Path& path);

// Reads what every output feature has, and the type `product_dtype`. `kept` keeps the memory alive.
void read_features(const Int8Operands& o, int64_t n, Epilogue& epilogue,
                   std::vector<at::Tensor>& kept);

// `count` float32 of a tensor that `kept` keeps alive; a single element is repeated.
const float* keep_floats(const at::Tensor& tensor, int64_t count, const char* what,
                         std::vector<at::Tensor>& kept);

// Sums of rows of `k` bytes each, unsigned after the flip, minus `shift` each.
void sum_rows(const uint8_t* rows, int64_t ld, int64_t count, int64_t k, uint32_t flip,
              int32_t shift, int32_t* sums);

}  // namespace qfuse
