// How work is split: into strips of rows, and between threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"

namespace qfuse {

// Minimum work per thread (about 2 us); starting a team costs about as much.
constexpr int64_t kLeastCycles = 8000;
constexpr int64_t kLeastBytes = 32768;

// How many pieces of so many cycles, or of so many bytes, a thread takes at least.
inline int64_t grain_of_cycles(int64_t cycles) { return kLeastCycles / cycles + 1; }
inline int64_t grain_of_bytes(int64_t bytes) { return kLeastBytes / std::max<int64_t>(bytes, 1) + 1; }

// Rows that share a panel of dequantized weights, which takes as long as the products of about 10 rows
// in float32, and of up to 40 with AMX in bfloat16. There are fewer only where threads would have no
// work.
constexpr int64_t kRowsOfStrip = 256;
constexpr int64_t kLeastRowsOfStrip = 48;
// Rows of the largest tile of any instruction set.
constexpr int64_t kRowsOfLargestTile = 32;

// Rows that are multiplied, and finished after the last panel of weights, before the next ones are, so
// that their float32 sums and results stay in the L1 cache. A multiple of the rows of every tile of
// floats in float32.
constexpr int64_t kFinishedRows = 24;

inline int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Splits rows evenly until there is work for all threads, into whole tiles but for the last one. Sums
// do not depend on it.
inline int64_t rows_per_strip(int64_t rows, int64_t blocks) {
  int64_t strip = std::min(rows, kRowsOfStrip);
  while (strip > kLeastRowsOfStrip && parts_of(rows, strip) * blocks < 3 * at::get_num_threads()) {
    strip = (strip + 1) / 2;
  }
  const int64_t even = parts_of(rows, parts_of(rows, strip));
  return std::min(rows, parts_of(even, kRowsOfLargestTile) * kRowsOfLargestTile);
}

}  // namespace qfuse
