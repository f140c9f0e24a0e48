// Sums of more products than int32 can hold.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_api.h"

namespace qfuse {

// The zero points of the bytes as multiplied.
struct ZeroPoints {
  const int32_t* row;     // of the rows: one, or one for each
  bool per_row;
  const int32_t* column;  // one for each column of the block
};

// Computes the totals of tiles of one block: the sum over k of (x - x_zero) * (w - w_zero), exact
// in int64, and then rounded to float32.
class DeepSums {
 public:
  // `ones` are as many bytes 1 as `groups` groups have.
  DeepSums(const Path& path, const Path& path_of_sums, const uint8_t* ones, int64_t rows);

  // `tile` has all rows, and K = `k` bytes per row; `sums` are floats [rows][64], and memory for
  // int32 sums on the way.
  void totals(const Tile& tile, int64_t tile_rows, int64_t k, const ZeroPoints& zero, void* sums);

 private:
  void add_row_sums(const Tile& tile, int64_t k);

  const Path& path_;
  const Path& path_of_sums_;
  const uint8_t* ones_;
  std::vector<int64_t> totals_;   // [rows][64]
  std::vector<int64_t> rows_;     // sums of rows
  std::vector<int64_t> columns_;  // sums of columns
};

}  // namespace qfuse
