// Weight-only convolutions with one input channel per group.
#pragma once

#include "convolution/destination.h"
#include "convolution/geometry.h"
#include "convolution/layout.h"
#include "isa/select.h"
#include "linear/real_weight.h"

namespace qfuse {

// What a weight-only convolution computes on.
struct RealConvolution {
  const Geometry& g;
  const RealWeight& weight;
  const Path& path;
  const CodeKernels& kernels;
  const Finish& finish;
  Real type;  // of the pixels, to multiply in
  Pixels x;
};

// Words of the packed weight per output channel and phase.
int64_t words_of(const RealWeight& weight, const Geometry& g, const Phase& phase);

// Pixels have to be float32.
void run_depthwise(const RealConvolution& convolution);

}  // namespace qfuse
