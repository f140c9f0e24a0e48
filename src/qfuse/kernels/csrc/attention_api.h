// The part of the interface in kernel_api.h that is about attention.
#pragma once

#include <cstdint>

namespace qfuse {

enum class Real : int32_t;

// Rows of an operand: `data + i * row + k * feature` is feature k of row i.
struct OperandRows {
  const void* data;
  Real type;
  int64_t row;  // in elements, as is `feature`
  int64_t feature;
  int64_t rows;
  int64_t features;
};

// Scores of queries with a chunk of adjacent keys, in panels of 64 keys. Of row i, those of a panel
// are at scores + (panel * ld + i) * 64.
struct ScoreRows {
  float* scores;
  int64_t ld;  // rows of a panel
  int64_t rows;
  int64_t keys;
  float scale;       // of the scores, before the mask; positive
  Real used;         // type of the weights; bfloat16 is written to the first half of their rows
  const void* mask;  // of the first row and key, or null: float32, which is added, or bool
  int64_t mask_ld;   // elements between its rows
  bool is_bool;      // minus infinity is added where the mask is false
  int64_t visible;   // row i has the first `visible + i` keys at most
  float* greatest;   // per row: the greatest score of this and earlier chunks
  float* total;      // per row: the sum of the exponentials
  float* factor;     // per row: what sums of earlier chunks are multiplied by
};

// Sums of weighted values, in panels of 64 features as scores are.
struct WeightedRows {
  const float* sums;
  int64_t ld;  // rows of a panel
  int64_t rows;
  int64_t features;
  const float* total;  // per row: what they are divided by; a row with 0 is 0
  void* out;
  int64_t out_ld;
  Real type;  // of `out`
};

// Operands of bfloat16 are used as that or as float32, others as float32.
struct AttentionKernels {
  // Writes rows of `padded` features, which are zero behind those of x.
  void (*copy_rows)(const OperandRows& x, Real used, int64_t padded, void* to);
  // Writes at most 64 rows as the columns of a panel of `padded` rows, zero elsewhere.
  void (*pack_columns)(const OperandRows& x, Real used, int64_t padded, void* to);
  // Writes rows of at most 64 features as the first `padded` rows of a panel, zero elsewhere.
  void (*pack_rows)(const OperandRows& x, Real used, int64_t padded, void* to);
  // Replaces scores by the exponentials of their differences from the greatest one. They are 0
  // where a key is masked, and from the last key up to the end of its panel.
  void (*softmax)(const ScoreRows& rows);
  void (*write)(const WeightedRows& rows);
};

}  // namespace qfuse
