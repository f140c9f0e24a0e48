// The rows of the patch matrix: for each output pixel, the input pixels that its taps read.
#pragma once

#include <cstdint>

#include "convolution/geometry.h"
#include "convolution/layout.h"
#include "kernel_api.h"

namespace qfuse {

// Bytes behind a panel that `gather` may write.
constexpr int64_t kPanelSlack = kRunSlack;

// Where the pixels of a phase come from.
struct Patches {
  const Pixels& x;
  const std::array<int64_t, kAxes>& in;
  const Phase& phase;
  int64_t channels;  // of a group, in bytes
  uint8_t zero;      // every byte of taps in the padding: of the zero point, or 0 of floats
};

// Writes `count` rows from output pixel `first` of the phase on, counted over all images; channels
// start at the byte `channel` of a pixel. Rows are `ld` bytes apart and in order of the taps; what
// lies between them is undefined.
void gather(const Path& path, const Patches& p, int64_t first, int64_t count, int64_t channel,
            uint8_t* panel, int64_t ld);

}  // namespace qfuse
