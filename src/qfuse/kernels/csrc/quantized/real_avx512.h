#pragma once

#include "kernel_api.h"

namespace qfuse {

// The float matmuls of all paths for processors with AVX512.
const RealKernels& real_avx512();

}  // namespace qfuse
