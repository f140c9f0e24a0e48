// How the tensors of a convolution lie in memory: the kernels read and write rows, which are the
// channels of one pixel.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <vector>

#include "convolution/geometry.h"
#include "kernel_api.h"

namespace qfuse {

// Where the pixels of a tensor are; channels are adjacent.
struct Strides {
  int64_t image;
  std::array<int64_t, kAxes> axis;

  // The distance of adjacent pixels if it is the same within an image of such a size.
  std::optional<int64_t> row(const std::array<int64_t, kAxes>& size) const;
};

// The bytes of pixels; strides are in bytes.
struct Pixels {
  at::Tensor tensor;  // keeps the memory alive
  const uint8_t* data;
  const uint8_t* end;  // of the memory that may be read
  Strides strides;
};

// The distance in bytes of the input pixels that the output pixels read in order, if each of them
// reads only the one of its index, and the distance is fixed.
std::optional<int64_t> read_in_order(const Geometry& g, const Pixels& x);

// Copies only if the channels of `x` are not adjacent.
Pixels pixels_of(const at::Tensor& x, const Geometry& g);

// The rows of an extra after broadcasting to the result, one for each output pixel of an image.
struct Extra {
  ElementRows rows;  // of the first image
  int64_t image;  // distance of images, in elements
};

// Copies only if the rows of `extra` are not at a fixed distance with adjacent elements. `kept`
// keeps the memory alive.
Extra extra_of(const at::Tensor& extra, const Geometry& g, std::vector<at::Tensor>& kept);

// Memory for the rows of the result.
struct Result {
  at::Tensor result;
  at::Tensor rows;  // [images * pixels, features], contiguous, or the result if it lies like that
};

// A result in the memory format that torch gives it: channels last if `x` is, else contiguous.
Result result_of(const at::Tensor& x, const Geometry& g, at::ScalarType type);

// Returns the result, with its elements copied from the rows if those have memory of their own.
at::Tensor finished(const Result& result, const Geometry& g);

}  // namespace qfuse
