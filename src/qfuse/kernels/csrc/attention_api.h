// The part of the interface in kernel_api.h that is about attention.
#pragma once

#include <cstdint>

namespace qfuse {

// Scores of queries with a chunk of adjacent keys, in panels of 64 keys. Of row i, those of a panel
// are at scores + (panel * ld + i) * 64.
struct ScoreRows {
  float* scores;
  int64_t ld;  // rows of a panel
  int64_t rows;
  int64_t keys;
  const void* mask;  // of the first row and key, or null: float32, which is added, or bool
  int64_t mask_ld;   // elements between its rows
  bool is_bool;      // minus infinity is added where the mask is false
  int64_t visible;   // row i has the first `visible + i` keys at most
  float* greatest;   // per row: the greatest score of this and earlier chunks
  float* total;      // per row: the sum of the exponentials
  float* factor;     // per row: what sums of earlier chunks are multiplied by
};

struct AttentionKernels {
  // Replaces scores by the exponentials of their differences from the greatest one. They are 0
  // where a key is masked, and from the last key up to the end of its panel.
  void (*softmax)(const ScoreRows& rows);
};

}  // namespace qfuse
