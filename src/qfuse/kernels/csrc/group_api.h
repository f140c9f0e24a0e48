// The part of kernel_api.h for weights that have scales for groups along K.
#pragma once

#include <cstdint>

namespace qfuse {

struct Following;

// Groups along K of one block of weights, each with its own scales. The total of a feature is the
// sum over groups, in order and from zero, of float(sum) * scale, where
//   sum = sum over k of (x - x_zero) * (w - w_zero)
//       = (sum over k of x * w) - x_zero * w_sums + w_zero * x_terms
// in int32, wrapping, with x and x_zero as the bytes that the kernel multiplied, w_sums the sum of
// w, and x_terms the negated sum of x - x_zero. With a single weight zero point, w_zero is null and
// x_terms are already multiplied by it.
struct Groups {
  int64_t count;
  const float* scale;         // [count][64]
  const int16_t* short_sums;  // [count][64], w_sums if they fit, or null
  const int32_t* long_sums;   // [count][64], w_sums if they do not fit 16 bits
  const int8_t* w_zero;       // [count][64], or null
  const int32_t* x_zero;      // one per row, or null
  const int32_t* x_terms;     // [rows][count], or null
};

// A tile with weights in groups, each of `depth` groups of four k.
struct GroupTile {
  const uint8_t* a;
  int64_t lda;
  int64_t rows;
  const uint8_t* b;  // of one block: bytes as in Tile, or 4-bit values, two per byte
  int64_t depth;
  Groups groups;
  bool is_signed;  // the rows; 4-bit values are multiplied by signed bytes
  Following* following = nullptr;
};

struct GroupKernels {
  // Unpacks 4-bit values to bytes: `pairs` of groups of four k.
  void (*unpack)(const uint8_t* codes, int64_t pairs, uint8_t* panel);
  // Adds the contribution of a group, whose integer sums are in `sums`, to `totals`.
  void (*add)(const Groups& groups, int64_t group, const int32_t* sums, int64_t rows,
              float* totals);
  // Add all groups of a tile of any height to `totals`, or null if that is done with the above and
  // Path::multiply. Bytes are multiplied by unsigned ones, unless the path keeps signs.
  void (*codes)(const GroupTile& tile, float* totals);
  void (*bytes)(const GroupTile& tile, float* totals);
  // The same for the groups from `first` until `last`, whose bytes, or unpacked 4-bit values, are
  // those of the tile. Null if that is done with the above.
  void (*panel)(const GroupTile& tile, int64_t first, int64_t last, float* totals) = nullptr;
  // Up to how many rows `codes` and `bytes` are at least as fast as panels.
  int64_t code_rows = INT64_MAX;
  int64_t byte_rows = INT64_MAX;
};

}  // namespace qfuse
