// Scale and zero point of a row from its minimum and maximum, for dynamic quantization.
#pragma once

#include <string_view>

#include "kernel_api.h"

namespace qfuse {

// The formulas of src/qfuse/ir/quant/choose.py, which names their sources.
enum class Formula : int32_t {
  given,
  ao_symmetric,
  ao_symmetric_no_clipping,
  ao_asymmetric,
  decomposed_affine,
  decomposed_symmetric,
  token_symmetric,
  token_asymmetric,
};

// Throws for an unknown name; the empty text is `given` (static).
Formula formula_of(std::string_view text);

// A value in the type that torch computes in: that of the row, or wider if the source widens.
struct Chooser {
  Formula formula;
  Real real;  // of the row
  float low;  // the quantized range
  float high;
  float eps;
  bool bytes;  // uint8 rather than int8
};

struct Chosen {
  float scale;
  float zero_point;
};

Chosen choose(const Chooser& by, Extremes row);

// `value` rounded to `type`.
float rounded(Real type, float value);

}  // namespace qfuse
