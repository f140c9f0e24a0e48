// Scale and zero point of a row from its extremes, by the formulas of dynamic quantization.
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

// Throws for a text that names none; the empty text is `given`.
Formula formula_of(std::string_view text);

// A number as torch computes with it: in the type of the row, or wider where the source widens.
struct Chooser {
  Formula formula;
  Real real;  // of the row
  float low;  // the range of the codes
  float high;
  float eps;
  bool bytes;  // uint8 codes
};

struct Chosen {
  float scale;
  float zero_point;
};

Chosen choose(const Chooser& by, Extremes row);

// `value` rounded to `type`.
float rounded(Real type, float value);

}  // namespace qfuse
