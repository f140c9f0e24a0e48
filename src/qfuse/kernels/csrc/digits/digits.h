// The rows of a weight-only linear as digits, see digits/digit_rows.h.
#pragma once

#include <array>
#include <optional>

#include "linear/buffer.h"
#include "digits/digit_rows.h"
#include "linear/operands.h"
#include "linear/real_weight.h"

namespace qfuse {

// At most kStreamRows rows. Whether and how a row is split depends on its values, on its length and
// on whether there are more than kFourDigitRows.
class Digits {
 public:
  // Splits no row where the path or the weight does not support it, or where it would not pay:
  // weights are integers of eight bits with one scale per output feature, or, with one row, of four
  // bits in any groups but short ones; neither with offsets.
  Digits(const Path& path, const RealWeight& weight, const Rows& x);

  int64_t rows() const { return rows_; }
  bool any() const { return split_ > 0; }
  bool all() const { return split_ == rows_; }

  // Writes the sums of those rows that have digits.
  void multiply(const RealBlock& block, float* sums) const;

 private:
  void sum_segments(const RealWeight& weight);

  const DigitKernels* kernels_ = nullptr;
  int64_t rows_;
  bool four_;
  int64_t split_ = 0;
  int64_t count_ = 0;  // the most digits of a row
  std::array<DigitRow, kStreamRows> row_;
  std::optional<Buffer> digits_;
  std::optional<Buffer> rests_;
  std::optional<Buffer> sums_;  // of segments, see FourBitTile
};

}  // namespace qfuse
