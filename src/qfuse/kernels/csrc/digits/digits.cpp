#include "digits/digits.h"

#include <algorithm>
#include <cstring>

namespace qfuse {
namespace {

constexpr int64_t kWhole = 16;  // input features that are written at a time

bool multiplies(const RealWeight& w) {
  return w.format == Format::eight && w.whole && w.depth() <= kMostDigitDepth;
}

// Rows without digits are multiplied together with the others.
void clear(const DigitPlace& place, int64_t groups) {
  for (int64_t g = 0; g < groups; ++g) std::memset(place.digits + g * place.step, 0, kDigitBytes);
}

}  // namespace

Digits::Digits(const Path& path, const RealWeight& weight, const Rows& x) : rows_(x.rows) {
  if (!multiplies(weight)) return;
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
    count_ = std::max(count_, row_[i].digits);
    split_ += row_[i].digits > 0;
  }
  for (int64_t i = 0; i < rows_; ++i) {
    if (any() && row_[i].digits == 0) clear(place(i), groups);
  }
}

void Digits::multiply(const RealBlock& block, float* sums) const {
  kernels_->multiply({block, digits_->as<int8_t>(), rows_, count_, row_.data()}, sums);
}

}  // namespace qfuse
