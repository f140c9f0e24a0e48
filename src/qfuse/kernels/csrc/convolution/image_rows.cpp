#include "convolution/image_rows.h"

#include <optional>

#include "tensors.h"

namespace qfuse {
namespace {

constexpr int64_t kChannels = 1;  // axis

// The distance of adjacent pixels, over all images, if it is fixed and channels are adjacent.
std::optional<int64_t> distance_of_pixels(const at::Tensor& t) {
  if (t.size(kChannels) > 1 && t.stride(kChannels) != 1) return std::nullopt;
  int64_t pixels = 1;
  int64_t step = 0;
  for (int64_t axis = t.dim() - 1; axis >= 0; --axis) {
    if (axis == kChannels || t.size(axis) == 1) continue;
    if (pixels == 1) {
      step = t.stride(axis);
    } else if (t.stride(axis) != step * pixels) {
      return std::nullopt;
    }
    pixels *= t.size(axis);
  }
  return step;
}

}  // namespace

JoinedImages::JoinedImages(const std::vector<at::Tensor>& images) : parts(images) {
  const at::Tensor& first = parts[0];
  TORCH_CHECK(first.dim() == 4 || first.dim() == 5, "images must have 4 or 5 axes, not ",
              first.dim());
  format = first.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  const at::ScalarType type = first.scalar_type();
  shape = first.sizes().vec();
  shape[kChannels] = 0;
  for (const at::Tensor& part : parts) {
    bool same = part.dim() == first.dim() && part.scalar_type() == type;
    for (int64_t axis = 0; same && axis < first.dim(); ++axis) {
      same = axis == kChannels || part.size(axis) == first.size(axis);
    }
    TORCH_CHECK(same, "images may differ in their channels only: ", part.scalar_type(), " ",
                part.sizes(), " beside ", type, " ", first.sizes());
    shape[kChannels] += part.size(kChannels);
  }
}

std::vector<ImageRows> JoinedImages::rows() const {
  std::vector<ImageRows> rows;
  int64_t offset = 0;
  for (const at::Tensor& part : parts) {
    const int64_t channels = part.size(kChannels);
    if (channels == 0) continue;
    std::optional<int64_t> distance = distance_of_pixels(part);
    const at::Tensor tensor = distance ? part : part.contiguous(format);
    if (!distance) distance = distance_of_pixels(tensor);
    TORCH_CHECK(distance, "a contiguous part has no fixed distance of pixels");
    rows.push_back({tensor, static_cast<const char*>(tensor.const_data_ptr()), *distance, channels,
                    offset});
    offset += channels;
  }
  return rows;
}

at::Tensor JoinedImages::empty(at::ScalarType type) const {
  return empty_tensor(shape, parts[0].options().dtype(type), format);
}

}  // namespace qfuse
