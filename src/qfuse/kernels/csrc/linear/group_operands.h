// The operands of linears with groupwise weights, as the kernels read them.
#pragma once

#include "linear/linear_grouped.h"
#include "linear/operands.h"

namespace qfuse {

struct GroupedSize {
  int64_t rows, n, k;
  int64_t halves;  // 2 with a GLU, else 1
  int64_t blocks;  // of a half, each of which starts a new block
  int64_t groups;  // along K, each with a scale
  int64_t depth;   // groups of four k in each
  int64_t block_bytes;

  int64_t columns() const { return n / halves; }  // of the result
};

// Checks the weight's tensors against each other and against `x`.
GroupedSize grouped_size(const GroupedLinear& linear, const Rows& x, bool halved);

// The activation's bytes in one signedness for all kernels of a call, and the zero point terms.
struct GroupedInput {
  at::Tensor bytes;
  int64_t ld;
  at::Tensor zeros;  // int32, one per row; undefined if all are zero
  at::Tensor terms;  // int32 [rows, groups]; undefined without weight zero points

  const uint8_t* row(int64_t i) const {
    return static_cast<const uint8_t*>(bytes.const_data_ptr()) + i * ld;
  }
};

// Converts quantized activations to signed or to unsigned bytes.
GroupedInput grouped_input(const GroupedLinear& linear, const Rows& x, const GroupedSize& size,
                           bool wants_signed);

}  // namespace qfuse
