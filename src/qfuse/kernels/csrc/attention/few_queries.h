// Attention of few queries, which reads keys and values once.
#pragma once

#include "attention/attention.h"

namespace qfuse {

// Writes the result for operands that are not empty.
void attend_few(const Attention& a, const at::Tensor& result);

}  // namespace qfuse
