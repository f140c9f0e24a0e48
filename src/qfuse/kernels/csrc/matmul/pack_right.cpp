#include "matmul/pack_right.h"

#include <algorithm>
#include <cstring>

#include "kernel_api.h"

namespace qfuse {
namespace {

// Whole groups of adjacent k: four bytes of a column are one word.
void pack_words(const uint8_t* from, int64_t groups, int64_t n_stride, int64_t columns,
                uint32_t flip, int8_t* to) {
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t c = 0; c < columns; ++c) {
      uint32_t word;
      std::memcpy(&word, from + c * n_stride + g * kGroup, sizeof(word));
      word ^= flip;
      std::memcpy(to + (g * kBlock + c) * kGroup, &word, sizeof(word));
    }
  }
}

// Whole groups of adjacent columns: four rows are interleaved.
void pack_rows(const uint8_t* from, int64_t groups, int64_t k_stride, int64_t columns, uint8_t flip,
               int8_t* to) {
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* row = from + g * kGroup * k_stride;
    const uint8_t* a = row;
    const uint8_t* b = row + k_stride;
    const uint8_t* c = row + 2 * k_stride;
    const uint8_t* d = row + 3 * k_stride;
    auto* group = reinterpret_cast<uint8_t*>(to) + g * kBlock * kGroup;
    for (int64_t i = 0; i < columns; ++i) {
      group[i * kGroup] = a[i] ^ flip;
      group[i * kGroup + 1] = b[i] ^ flip;
      group[i * kGroup + 2] = c[i] ^ flip;
      group[i * kGroup + 3] = d[i] ^ flip;
    }
  }
}

}  // namespace

void pack_block(const ByteMatrix& from, int64_t column, int64_t columns, uint8_t flip, int8_t* to) {
  const uint8_t* data = from.data + column * from.n_stride;
  const int64_t groups = (from.k + kGroup - 1) / kGroup;
  int64_t whole = from.k / kGroup;
  if (columns < kBlock) std::memset(to, 0, groups * kBlock * kGroup);
  if (from.k_stride == 1) {
    pack_words(data, whole, from.n_stride, columns, flip * 0x01010101u, to);
  } else if (from.n_stride == 1) {
    pack_rows(data, whole, from.k_stride, columns, flip, to);
  } else {
    whole = 0;
  }
  // The rest, and matrices without adjacent elements.
  for (int64_t g = whole; g < groups; ++g) {
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t i = 0; i < kGroup; ++i) {
        const int64_t k = g * kGroup + i;
        const uint8_t byte =
            k < from.k ? data[k * from.k_stride + c * from.n_stride] ^ flip : uint8_t{0};
        to[(g * kBlock + c) * kGroup + i] = static_cast<int8_t>(byte);
      }
    }
  }
}

}  // namespace qfuse
