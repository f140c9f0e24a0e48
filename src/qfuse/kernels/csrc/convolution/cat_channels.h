#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace qfuse {

// Joins int8 or uint8 images [N, C, spatial...], at least one, along their channels; the result is
// channels-last.
// Images whose pixels have adjacent channels and a fixed distance are read in place.
at::Tensor cat_channels(const std::vector<at::Tensor>& parts);

}  // namespace qfuse
