// Images [N, C, *S] as rows, which are the channels of one pixel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace qfuse {

// The pixels of one of several images that are joined along their channels.
struct ImageRows {
  at::Tensor tensor;  // keeps the memory alive
  const char* data;
  int64_t ld;  // distance of adjacent pixels, over all images of a batch, in elements
  int64_t channels;
  int64_t offset;  // of the first channel in the joined image

  const char* row(int64_t pixel) const {
    return data + pixel * ld * static_cast<int64_t>(tensor.element_size());
  }
};

// Images that differ in their channels only.
struct JoinedImages {
  explicit JoinedImages(const std::vector<at::Tensor>& parts);

  // Rows of the parts that have channels. Copies parts whose channels are not adjacent, or whose
  // pixels are not at a fixed distance. Only for images with pixels.
  std::vector<ImageRows> rows() const;

  // Channels-last memory for the joined image.
  at::Tensor empty(at::ScalarType type) const;

  const std::vector<at::Tensor>& parts;
  std::vector<int64_t> shape;
  at::MemoryFormat format;
};

}  // namespace qfuse
