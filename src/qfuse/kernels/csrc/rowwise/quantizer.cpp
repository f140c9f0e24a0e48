#include "rowwise/quantizer.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "linear/operands.h"

namespace qfuse {
namespace {

// The reciprocal is computed in the type of the scale, then rounded to float32.
float reciprocal(const at::Tensor& scale, double value) {
  if (scale.scalar_type() == at::kDouble) return static_cast<float>(1.0 / value);
  if (scale.scalar_type() == at::kFloat) return 1.0f / static_cast<float>(value);
  return scale.reciprocal().item<float>();
}

// Well below the magnitude from which floats lack halves.
constexpr float kLargestZero = 0x1p20f;

}  // namespace

void check_codes(at::ScalarType type, int64_t quant_min, int64_t quant_max) {
  TORCH_CHECK(type == at::kChar || type == at::kByte, "codes must be int8 or uint8, not ", type);
  const int64_t least = type == at::kChar ? -128 : 0;
  TORCH_CHECK(least <= quant_min && quant_min <= quant_max && quant_max <= least + 255,
              "quant_min and quant_max must be a range of the codes' type");
}

Quantizer quantizer_of(const Output& o, at::ScalarType type) {
  check_codes(type, o.quant_min, o.quant_max);
  TORCH_CHECK(at::isFloatingType(o.scale.scalar_type()), "out_scale must be a float");
  const double scale = number_of(o.scale, "out_scale");
  Quantizer q{static_cast<float>(scale),       0.0f,          static_cast<float>(o.quant_min),
              static_cast<float>(o.quant_max), !o.reciprocal, o.zero_point_first, Real::f32};
  if (o.reciprocal) q.factor = reciprocal(o.scale, scale);
  if (o.zero_point) q.zero = static_cast<float>(number_of(*o.zero_point, "out_zero_point"));
  q.plain = !q.zero_first && std::abs(q.zero) < kLargestZero && q.zero == std::nearbyint(q.zero);
  q.least = q.low - q.zero;
  q.most = q.high - q.zero;
  return q;
}

void fold_clamps(Epilogue& epilogue) {
  Quantizer& q = epilogue.quantizer;
  // Multiplying by a positive factor is monotonic, also rounded, so a clamp in front of it is one
  // behind it.
  if (!q.plain || !(q.factor > 0) || !std::isfinite(q.factor)) return;
  const auto scaled = [&](float x) { return q.divide ? x / q.factor : x * q.factor; };
  const auto clamped = [&](float x) { return std::min(std::max(x, q.least), q.most); };
  while (epilogue.steps > 0 && epilogue.steps > epilogue.up) {
    const Step& step = epilogue.step[epilogue.steps - 1];
    const bool relu = step.kind == StepKind::relu;
    if (step.type != Real::f32 || !(relu || step.kind == StepKind::hardtanh)) return;
    const float low = relu ? 0.0f : step.a;
    const float high = relu ? std::numeric_limits<float>::infinity() : step.b;
    if (std::isnan(low) || std::isnan(high)) return;
    const float least = clamped(scaled(std::min(low, high)));
    q.most = clamped(scaled(high));
    q.least = least;
    --epilogue.steps;
  }
}

}  // namespace qfuse
