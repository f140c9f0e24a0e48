#include "digits/digits.h"

#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

namespace qfuse {
namespace {

constexpr int64_t kWhole = 16;  // input features that are written at a time

// Those of a path, or null.
const DigitKernels* kernels_of(const Path& path) {
#if defined(__x86_64__)
  if (&path == &avx512_vnni_path() || &path == &brgemm_path()) return &digits_avx512_vnni();
#endif
  return nullptr;
}

bool multiplies(const RealWeight& w) {
  return w.format == Format::eight && w.whole && w.depth() <= kMostDigitDepth;
}

}  // namespace

Digits::Digits(const Path& path, const RealWeight& weight, const Rows& x) : rows_(x.rows) {
  if (!multiplies(weight)) return;
  kernels_ = kernels_of(path);
  if (!kernels_) return;
  const int64_t most = rows_ > kFourDigitRows ? kMostDigits - 1 : kMostDigits;
  const int64_t groups = (x.columns + kWhole - 1) / kWhole * (kWhole / kGroup);
  const int64_t rests = most_rests(x.columns);
  // Rows without digits are multiplied too, so they are zero.
  digits_ = at::zeros({groups * rows_ * kDigitBytes}, at::kChar);
  rests_.resize(rows_ * rests);
  auto* digits = digits_.mutable_data_ptr<int8_t>();
  const auto* from = static_cast<const char*>(x.tensor.const_data_ptr());
  for (int64_t i = 0; i < rows_; ++i, from += x.ld * x.tensor.element_size()) {
    const DigitPlace place{digits + i * kDigitBytes, rows_ * kDigitBytes, rests_.data() + i * rests};
    row_[i] = kernels_->split(from, weight.real, x.columns, most, place);
    count_ = std::max(count_, row_[i].digits);
    split_ += row_[i].digits > 0;
  }
}

void Digits::multiply(const RealBlock& block, float* sums) const {
  kernels_->multiply({block, digits_.const_data_ptr<int8_t>(), rows_, count_, row_.data()}, sums);
}

}  // namespace qfuse
