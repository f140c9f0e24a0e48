// Sizes of a convolution, and which input pixels its output pixels read.
//
// All convolutions have three spatial axes here (z, y, x); missing ones have size 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace qfuse {

constexpr size_t kAxes = 3;

// The spatial arguments of a convolution, one number per axis. Meanings as in
// torch.nn.functional. If it is not transposed, there may be two paddings per axis: those before all
// axes, then those after.
struct Window {
  at::IntArrayRef kernel;
  at::IntArrayRef stride;
  at::IntArrayRef padding;
  at::IntArrayRef dilation;
  at::IntArrayRef output_padding;
  bool transposed;
  int64_t groups;
};

// One axis of the output pixels that a phase computes, every `out_step`-th from `out_first` on.
// Tap `t` of pixel `i` reads the input at first + i * step + t * tap_step, which may lie outside.
struct Line {
  int64_t pixels;
  int64_t out_first;
  int64_t out_step;
  int64_t taps;
  int64_t first;
  int64_t step;
  int64_t tap_step;
};

// Output pixels whose taps are the same: all of an ordinary convolution, or those of a transposed
// one whose positions have the same remainder by the stride. Transposed, the last tap is first.
struct Phase {
  std::array<Line, kAxes> line;
  int64_t taps() const { return line[0].taps * line[1].taps * line[2].taps; }
  int64_t pixels() const { return line[0].pixels * line[1].pixels * line[2].pixels; }
};

struct Geometry {
  bool batched;
  int64_t spatial;  // axes of the tensors
  int64_t images;
  int64_t channels;
  int64_t features;  // output channels
  int64_t groups;
  std::array<int64_t, kAxes> in;
  std::array<int64_t, kAxes> out;
  std::vector<Phase> phases;

  int64_t in_channels() const { return channels / groups; }    // of a group
  int64_t out_channels() const { return features / groups; }
  int64_t pixels() const { return out[0] * out[1] * out[2]; }  // of an output image
  std::vector<int64_t> shape() const;                          // of the result
};

// Checks the arguments against the sizes of `x`.
Geometry geometry_of(const at::Tensor& x, int64_t features, const Window& window);

}  // namespace qfuse
