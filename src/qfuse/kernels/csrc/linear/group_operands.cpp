#include "linear/group_operands.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>

#include "linear/int8_operands.h"
#include "parallel.h"
#include "quantized/stored.h"
#include "tensors.h"

namespace qfuse {
namespace {

// Sums of a group are exact in int32: |x - x_zero| <= 255, |w - w_zero| <= 255, and their products
// with a one-byte zero point also stay below 2^31.
constexpr int64_t kMostInGroup = int64_t{1} << 15;
constexpr int64_t kLeastBytes = 32768;  // minimum read per thread, about 2 us

void check_blocks(const at::Tensor& t, at::ScalarType type, const GroupedSize& size,
                  const char* what) {
  TORCH_CHECK(t.scalar_type() == type && t.is_contiguous() &&
                  t.sizes() == at::IntArrayRef({size.blocks * size.halves, size.groups, kBlock}),
              what, " must be contiguous ", type, " [", size.blocks * size.halves, ", ",
              size.groups, ", ", kBlock, "], not ", t.scalar_type(), " ", t.sizes());
}

// Number of adjacent k of a feature.
int64_t step_of(WeightBits bits) { return bits == WeightBits::four ? 2 * kGroup : kGroup; }

void check_weight(const GroupedLinear& l, const GroupedSize& size) {
  const at::ScalarType type = l.bits == WeightBits::four ? at::kByte : at::kChar;
  const int64_t step = step_of(l.bits);
  TORCH_CHECK(l.w_packed.scalar_type() == type && l.w_packed.is_contiguous() &&
                  l.w_packed.sizes() == at::IntArrayRef({size.blocks * size.halves,
                                                         (size.k + step - 1) / step, kBlock,
                                                         kGroup}),
              "w_packed must be contiguous ", type, " [ceil(N / 64), ceil(K / ", step,
              "), 64, 4] with N = ", size.n, " (each half for itself where they are multiplied)",
              " and K = ", size.k, " (last axis of x), not ",
              l.w_packed.scalar_type(), " ", l.w_packed.sizes());
  check_blocks(l.w_scale, at::kFloat, size, "w_scale");
  const bool short_sums = l.w_sums.scalar_type() == at::kShort;
  check_blocks(l.w_sums, short_sums ? at::kShort : at::kInt, size, "w_sums");
  if (l.w_zero_point && l.w_zero_point->numel() == 1) {
    TORCH_CHECK(l.w_zero_point->scalar_type() == at::kChar, "w_zero_point must be int8");
  } else if (l.w_zero_point) {
    check_blocks(*l.w_zero_point, at::kChar, size, "w_zero_point");
  }
}

template <class Byte>
void terms_of(const uint8_t* row, const GroupedSize& size, int32_t zero, int32_t factor,
              int32_t* terms) {
  const int64_t length = size.k / size.groups;
  for (int64_t g = 0; g < size.groups; ++g) {
    int32_t sum = 0;
    for (int64_t k = 0; k < length; ++k) sum += static_cast<Byte>(row[g * length + k]);
    terms[g] = factor * (static_cast<int32_t>(length) * zero - sum);
  }
}

// Zero points of the bytes as multiplied; undefined if all are zero.
at::Tensor zeros_of(const GroupedLinear& l, int64_t rows, bool wants_signed) {
  const int32_t least = least_of(l.x.scalar_type());
  const int32_t shift = wants_signed ? 128 : 0;
  if (!l.x_zero_point || l.x_zero_point->numel() == 1) {
    const int32_t zero = only_zero(l.x_zero_point, least, shift);
    return zero == 0 ? at::Tensor() : filled_tensor({rows}, zero, at::kInt);
  }
  return row_zeros(*l.x_zero_point, rows, least, shift);
}

}  // namespace

GroupedSize grouped_size(const GroupedLinear& l, const Rows& x, bool halved) {
  TORCH_CHECK(l.x.scalar_type() == at::kChar || l.x.scalar_type() == at::kByte,
              "x must be int8 or uint8, not ", l.x.scalar_type());
  TORCH_CHECK(l.w_scale.dim() == 3 && l.w_scale.size(1) >= 1,
              "w_scale must be [ceil(N / 64), groups, 64], not ", l.w_scale.sizes());
  const int64_t step = step_of(l.bits);
  GroupedSize size{x.rows, l.features, x.columns, halved ? 2 : 1, 0, l.w_scale.size(1), 0, 0};
  size.blocks = (size.columns() + kBlock - 1) / kBlock;
  TORCH_CHECK(size.groups == 1 || size.k % (size.groups * step) == 0, size.groups,
              " groups of K = ", size.k, ": a group must be a multiple of ", step, " unless it is K");
  TORCH_CHECK(size.k / size.groups <= kMostInGroup, "a group has ", size.k / size.groups,
              " elements; int32 sums are exact up to ", kMostInGroup);
  const int64_t whole = (size.k + step - 1) / step * (step / kGroup);
  size.depth = whole / size.groups;
  size.block_bytes = whole * kGroup * kBlock * kGroup / step;
  check_weight(l, size);
  return size;
}

GroupedInput grouped_input(const GroupedLinear& l, const Rows& x, const GroupedSize& size,
                           bool wants_signed) {
  const int64_t depth = size.depth * size.groups * kGroup;
  const bool flips = (x.tensor.scalar_type() == at::kChar) != wants_signed;
  const bool copies = flips || depth != size.k || x.ld < size.k;
  const int64_t ld = copies ? depth : x.ld;
  GroupedInput input{copies ? empty_tensor({size.rows, depth}, at::kByte) : x.tensor, ld,
                     zeros_of(l, size.rows, wants_signed), at::Tensor()};
  int32_t factor = 1;
  if (l.w_zero_point && l.w_zero_point->numel() == 1) {
    factor = *l.w_zero_point->const_data_ptr<int8_t>();
  }
  if (l.w_zero_point && factor != 0) input.terms = empty_tensor({size.rows, size.groups}, at::kInt);
  if (!copies && !input.terms.defined()) return input;

  const auto* from = static_cast<const uint8_t*>(x.tensor.const_data_ptr());
  auto* copy = copies ? input.bytes.mutable_data_ptr<uint8_t>() : nullptr;
  const auto* zeros = input.zeros.defined() ? input.zeros.const_data_ptr<int32_t>() : nullptr;
  auto* terms = input.terms.defined() ? input.terms.mutable_data_ptr<int32_t>() : nullptr;
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (copy) {
        copy_flipped(from + i * x.ld, size.k, flips ? kSignBits : 0, copy + i * ld);
        std::memset(copy + i * ld + size.k, 0, ld - size.k);
      }
      if (!terms) continue;
      const uint8_t* row = copy ? copy + i * ld : from + i * x.ld;
      const auto sum = wants_signed ? &terms_of<int8_t> : &terms_of<uint8_t>;
      sum(row, size, zeros ? zeros[i] : 0, factor, terms + i * size.groups);
    }
  };
  parallel_for(0, size.rows, kLeastBytes / std::max<int64_t>(depth, 1) + 1, work);
  return input;
}

}  // namespace qfuse
