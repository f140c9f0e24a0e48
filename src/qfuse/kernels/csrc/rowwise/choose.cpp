#include "rowwise/choose.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <array>
#include <cmath>
#include <utility>

namespace qfuse {
namespace {

constexpr std::array<std::pair<std::string_view, Formula>, 8> kFormulas{{
    {"", Formula::given},
    {"ao-symmetric", Formula::ao_symmetric},
    {"ao-symmetric-no-clipping", Formula::ao_symmetric_no_clipping},
    {"ao-asymmetric", Formula::ao_asymmetric},
    {"decomposed-affine", Formula::decomposed_affine},
    {"decomposed-symmetric", Formula::decomposed_symmetric},
    {"token-symmetric", Formula::token_symmetric},
    {"token-asymmetric", Formula::token_asymmetric},
}};

// The maximum, or NaN if one is NaN, as in torch.
float greater(float a, float b) { return a > b || std::isnan(a) ? a : b; }

// The decomposed ops compare with a float32 tensor, which widens; torchao with a number.
float at_least_eps(const Chooser& by, float scale, bool widens) {
  return greater(scale, widens ? by.eps : rounded(by.real, by.eps));
}

float clamped(float x, float low, float high) { return std::isnan(x) ? x : std::fmin(std::fmax(x, low), high); }

Chosen symmetric(const Chooser& by, float low, float high) {
  const bool decomposed = by.formula == Formula::decomposed_symmetric;
  const float scale = rounded(by.real, greater(-low, high) / ((by.high - by.low) / 2));
  const float middle = std::trunc((by.high + by.low + 1) / 2);
  const float zero = decomposed ? (by.bytes ? 128.0f : 0.0f) : middle;
  return {at_least_eps(by, scale, decomposed), zero};
}

Chosen without_clipping(const Chooser& by, float low, float high) {
  const float below = rounded(by.real, low / by.low);
  const float above = rounded(by.real, high / by.high);
  return {at_least_eps(by, below > above ? below : above, false),
          std::trunc((by.high + by.low + 1) / 2)};
}

Chosen affine(const Chooser& by, float low, float high) {
  const bool decomposed = by.formula == Formula::decomposed_affine;
  const Real type = decomposed ? Real::f32 : by.real;
  const float width = rounded(by.real, high - low);
  const float scale =
      at_least_eps(by, rounded(by.real, width / (by.high - by.low)), decomposed);
  const float ratio = std::nearbyint(rounded(type, low / scale));
  return {scale, clamped(rounded(type, by.low - ratio), by.low, by.high)};
}

Chosen token_symmetric(const Chooser& by, Extremes row) {
  const float most = greater(std::fabs(row.least), std::fabs(row.greatest));
  const Real type = by.real == Real::f16 ? Real::f32 : by.real;
  return {rounded(type, greater(most, rounded(type, by.eps)) / by.high), 0.0f};
}

Chosen token_asymmetric(const Chooser& by, float low, float high) {
  const float width = rounded(by.real, high - low);
  const float scale = at_least_eps(by, rounded(by.real, width / (by.high - by.low)), false);
  const float below = rounded(by.real, low / scale);
  const float above = rounded(by.real, high / scale);
  const float from_below = rounded(by.real, by.low + below);
  const float from_above = rounded(by.real, by.high + above);
  const bool anchor_below = rounded(by.real, from_below + from_above) > 0;
  const float zero = rounded(by.real, anchor_below ? by.low - below : by.high - above);
  return {scale, std::nearbyint(clamped(zero, by.low, by.high))};
}

}  // namespace

Formula formula_of(std::string_view text) {
  for (const auto& [name, formula] : kFormulas) {
    if (name == text) return formula;
  }
  TORCH_CHECK(false, "no formula '", text, "' for scale and zero point");
}

float rounded(Real type, float value) {
  if (type == Real::bf16) return c10::BFloat16(value);
  if (type == Real::f16) return c10::Half(value);
  return value;
}

Chosen choose(const Chooser& by, Extremes row) {
  const float low = row.least < 0 || std::isnan(row.least) ? row.least : 0.0f;
  const float high = row.greatest > 0 || std::isnan(row.greatest) ? row.greatest : 0.0f;
  switch (by.formula) {
    case Formula::ao_symmetric:
    case Formula::decomposed_symmetric:
      return symmetric(by, low, high);
    case Formula::ao_symmetric_no_clipping:
      return without_clipping(by, low, high);
    case Formula::token_symmetric:
      return token_symmetric(by, row);
    case Formula::token_asymmetric:
      return token_asymmetric(by, low, high);
    default:
      return affine(by, low, high);
  }
}

}  // namespace qfuse
