#include "digits/digits.h"

#include <algorithm>
#include <cstring>

namespace qfuse {
namespace {

constexpr int64_t kWhole = 16;  // input features that are written at a time
// Input features of a group of 4-bit weights; what is done for a group takes longer than the products
// of a shorter one.
constexpr int64_t kLeastGroup = 16;
// Of a unit of numbers that multiply 4-bit weights: it multiplies their sums as a float.
constexpr int kLeastExponent = -126;

// Without zero points, a row of native bfloat16 waits for memory too.
bool multiplies_four_bits(const Path& path, const RealWeight& w, int64_t rows) {
  const bool slow = w.zero.defined() || path.real->type_for(w.real) == Real::f32;
  return slow && rows == 1 && !w.offset.defined() && w.depth() >= w.groups * kLeastGroup;
}

bool multiplies(const Path& path, const RealWeight& w, int64_t rows) {
  if (w.format == Format::four) return multiplies_four_bits(path, w, rows);
  return w.format == Format::eight && w.whole && w.depth() <= kMostDigitDepth;
}

// Rows without digits are multiplied together with the others.
void clear(const DigitPlace& place, int64_t groups) {
  for (int64_t g = 0; g < groups; ++g) std::memset(place.digits + g * place.step, 0, kDigitBytes);
}

}  // namespace

Digits::Digits(const Path& path, const RealWeight& weight, const Rows& x)
    : rows_(x.rows), four_(weight.format == Format::four) {
  if (!multiplies(path, weight, rows_)) return;
  kernels_ = path.digits;
  if (!kernels_) return;
  const int64_t most = rows_ > kFourDigitRows ? kMostDigits - 1 : kMostDigits;
  const int64_t groups = (x.columns + kWhole - 1) / kWhole * (kWhole / kGroup);
  const int64_t rests = most_rests(x.columns);
  digits_.emplace(std::max<int64_t>(groups * rows_ * kDigitBytes, 1));
  rests_.emplace(std::max<int64_t>(rows_ * rests * static_cast<int64_t>(sizeof(Rest)), 1));
  auto* digits = digits_->as<int8_t>();
  const auto* from = static_cast<const char*>(x.tensor.const_data_ptr());
  const auto place = [&](int64_t i) {
    return DigitPlace{digits + i * kDigitBytes, rows_ * kDigitBytes, rests_->as<Rest>() + i * rests};
  };
  for (int64_t i = 0; i < rows_; ++i, from += x.ld * x.tensor.element_size()) {
    row_[i] = kernels_->split(from, weight.real, x.columns, most, place(i));
    if (four_ && row_[i].exponent < kLeastExponent) row_[i].digits = 0;
    count_ = std::max(count_, row_[i].digits);
    split_ += row_[i].digits > 0;
  }
  for (int64_t i = 0; i < rows_; ++i) {
    if (any() && row_[i].digits == 0) clear(place(i), groups);
  }
  if (any() && four_) sum_segments(weight);
}

void Digits::sum_segments(const RealWeight& w) {
  const int64_t group = w.depth() / w.groups;
  const int64_t segments = w.groups * ((group + kSegment - 1) / kSegment);
  sums_.emplace(2 * segments * static_cast<int64_t>(sizeof(int32_t)));
  kernels_->sum_segments(digits_->as<int8_t>(), w.depth(), group, sums_->as<int32_t>());
}

void Digits::multiply(const RealBlock& block, float* sums) const {
  const DigitTile tile{block, digits_->as<int8_t>(), rows_, count_, row_.data()};
  if (!four_) return kernels_->multiply(tile, sums);
  kernels_->multiply_four_bits({tile, sums_->as<int32_t>()}, sums);
}

}  // namespace qfuse
