// The part of the interface in kernel_api.h that is about attention.
#pragma once

#include <cstdint>

namespace qfuse {

enum class Real : int32_t;

// The products that a score of few queries adds side by side, on any instruction set.
constexpr int64_t kDot = 16;

// Rows of an operand. Strides are in elements.
struct OperandRows {
  const void* data;
  Real type;
  int64_t row_stride;
  int64_t feature_stride;
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
  Real product;      // type of the weights; bfloat16 is written to the first half of their rows
  const void* mask;  // of the first row and key, or null: float32, which is added, or bool
  int64_t mask_ld;   // elements between its rows
  bool is_bool;      // minus infinity is added where the mask is false
  int64_t visible;   // row i has the first `visible + i` keys at most
  float* greatest;   // per row: the greatest score of this and earlier chunks, masked; scaled
                     // only if a mask is added
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

// Sums of weighted values of several chunks of keys, each with a greatest score of its own: of chunk
// c, those of row i are at sums + (c * rows + i) * ld, and likewise for the other two.
struct PartialRows {
  const float* sums;
  const float* greatest;
  const float* total;
  int64_t chunks;
  int64_t rows;  // of a chunk
  int64_t ld;
  int64_t features;
  float scale;  // of the differences of greatest scores
};

// `product` is the type to multiply in: bfloat16 only for operands of bfloat16, otherwise float32.
// A panel is that of RealTile, so one of bfloat16 has pairs of rows. `padded` is a multiple of 4.
struct AttentionKernels {
  // Writes rows of `padded` features, which are zero behind those of x.
  void (*copy)(const OperandRows& x, Real product, int64_t padded, void* to);
  // Writes at most 64 rows as the columns of a panel of `padded` rows, zero elsewhere.
  void (*pack_columns)(const OperandRows& x, Real product, int64_t padded, void* to);
  // Writes rows of at most 64 features as the first rows of a panel of `padded` rows, zero
  // elsewhere.
  void (*pack_rows)(const OperandRows& x, Real product, int64_t padded, void* to);
  // Replaces scores by the exponentials of their differences from the greatest one. They are 0
  // where a key is masked, and from the last key up to the end of its panel.
  void (*softmax)(const ScoreRows& rows);
  // Divides sums by their totals.
  void (*write)(const WeightedRows& rows);
  // For few queries, which read keys and values once, as they are: rows of adjacent features.
  // Scores of `count` queries, in panels as those of ScoreRows. Queries are float32 with zeros up to
  // `ld` features, a multiple of kDot.
  void (*multiply_keys)(const OperandRows& keys, const float* queries, int64_t ld, int64_t count,
                        float* scores);
  // Adds the values, times weights in such panels, to sums of `ld` features.
  void (*add_values)(const OperandRows& values, const float* weights, int64_t count, int64_t ld,
                     float* sums);
  // Writes row `row` of the chunks together.
  void (*combine)(const PartialRows& parts, int64_t row, Real type, void* out);
};

}  // namespace qfuse
