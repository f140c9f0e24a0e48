// Depthwise sums in float32, for any instruction set.
#pragma once

#include "quantized/codes.h"

namespace {

// `Pixels` output pixels times `Vectors` vectors of channels, all of them whole, or one vector
// with `count` channels.
template <int Pixels, int Vectors, bool Whole>
QFUSE_INLINE void depthwise_f32_pixels(const qfuse::RealDepthwiseTile& t, int64_t first,
                                       int64_t channel, int64_t count, float* sums) {
  Floats total[Pixels * Vectors] = {};
  const float* const* pixel = t.pixel + first * t.step;
  const float* panel = t.panel + channel;
  for (int64_t k = 0; k < t.taps; ++k, panel += qfuse::kBlock) {
    Floats w[Vectors];
    Unrolled<Vectors>::run(
        [&]<int I>() QFUSE_LAMBDA { w[I] = load<Floats>(panel + I * kLanes, kLanes); });
    Unrolled<Pixels>::run([&]<int P>() QFUSE_LAMBDA {
      const float* from = pixel[P * t.step + t.tap[k]] + t.channel + channel;
      Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
        const Floats x = load<Floats>(from + I * kLanes, Whole ? kLanes : count);
        total[P * Vectors + I] = accumulated(total[P * Vectors + I], x, w[I]);
      });
    });
  }
  float* to = sums + first * qfuse::kBlock + channel;
  Unrolled<Pixels * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    store(to + (I / Vectors) * qfuse::kBlock + (I % Vectors) * kLanes, total[I], kLanes);
  });
}

template <int Vectors, bool Whole = true>
void depthwise_f32_columns(const qfuse::RealDepthwiseTile& t, int64_t channel, int64_t count,
                           float* sums) {
  for (int64_t i = 0; i < t.pixels;) {
    i += with_rows<4>(t.pixels - i, [&]<int P>() {
      depthwise_f32_pixels<P, Vectors, Whole>(t, i, channel, count, sums);
    });
  }
}

void depthwise_f32(const qfuse::RealDepthwiseTile& t, float* sums) {
  int64_t channel = 0;
  for (; t.channels - channel >= 2 * kLanes; channel += 2 * kLanes) {
    depthwise_f32_columns<2>(t, channel, 0, sums);
  }
  if (t.channels - channel >= kLanes) {
    depthwise_f32_columns<1>(t, channel, 0, sums);
    channel += kLanes;
  }
  if (t.channels > channel) {
    depthwise_f32_columns<1, false>(t, channel, t.channels - channel, sums);
  }
}

}  // namespace
