// Packs the right operand of a product at run time.
#pragma once

#include <cstdint>

namespace qfuse {

// A matrix [K, N] of bytes: element (k, n) is data[k * k_stride + n * n_stride].
struct ByteMatrix {
  const uint8_t* data;
  int64_t k;
  int64_t k_stride;
  int64_t n_stride;
};

// Packs at most 64 columns, from `column` on, as a block of packed weights (see kernel_api.h). Every
// byte is changed by `flip`; the block is padded with zeros.
void pack_block(const ByteMatrix& from, int64_t column, int64_t columns, uint8_t flip, int8_t* to);

}  // namespace qfuse
