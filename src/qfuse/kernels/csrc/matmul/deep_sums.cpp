#include "matmul/deep_sums.h"

#include <algorithm>

#include "linear/int8_operands.h"

namespace qfuse {
namespace {

constexpr int64_t kGroupsAtOnce = max_depth(false) / kGroup;

}  // namespace

DeepSums::DeepSums(const Path& path, const Path& path_of_sums, const uint8_t* ones, int64_t rows)
    : path_(path),
      path_of_sums_(path_of_sums),
      ones_(ones),
      totals_(rows * kBlock),
      rows_(rows),
      columns_(kBlock) {}

void DeepSums::add_row_sums(const Tile& tile, int64_t k) {
  const auto byte = static_cast<uint8_t>(tile.flip);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const uint8_t* from = tile.a + i * tile.lda;
    int64_t sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += static_cast<uint8_t>(from[j] ^ byte);
    rows_[i] = sum - k * shift_of(tile.flip, path_);
  }
}

void DeepSums::totals(const Tile& tile, int64_t tile_rows, int64_t k, const ZeroPoints& zero,
                      void* sums) {
  auto* part = static_cast<int32_t*>(sums);
  std::fill(totals_.begin(), totals_.end(), 0);
  std::fill(columns_.begin(), columns_.end(), 0);
  add_row_sums(tile, k);
  for (int64_t group = 0; group < tile.groups; group += kGroupsAtOnce) {
    Tile piece = tile;
    piece.groups = std::min(kGroupsAtOnce, tile.groups - group);
    piece.b += group * kGroup * kBlock;
    path_of_sums_.multiply({ones_, piece.groups * kGroup, 0, 1, piece.b, piece.groups, tile.columns},
                           part);
    for (int64_t c = 0; c < tile.columns; ++c) columns_[c] += part[c];
    for (int64_t i = 0; i < tile.rows; i += tile_rows) {
      piece.rows = std::min(tile_rows, tile.rows - i);
      piece.a = tile.a + i * tile.lda + group * kGroup;
      path_.multiply(piece, part + i * kBlock);
    }
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t at = i * kBlock;
      for (int64_t c = 0; c < tile.columns; ++c) totals_[at + c] += part[at + c];
    }
  }
  auto* out = static_cast<float*>(sums);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t x_zero = zero.row[zero.per_row ? i : 0];
    for (int64_t c = 0; c < tile.columns; ++c) {
      const int64_t w_zero = zero.column[c];
      const int64_t total = totals_[i * kBlock + c] - x_zero * (columns_[c] - w_zero * k) -
                            w_zero * rows_[i];
      out[i * kBlock + c] = static_cast<float>(total);
    }
  }
}

}  // namespace qfuse
