#include "convolution/cat_channels.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "linear/grain.h"

namespace qfuse {
namespace {

constexpr int64_t kChannels = 1;  // axis
// Pixels that are copied of one image after the other: their results stay in the L1 cache.
constexpr int64_t kStrip = 32;

// The rows of an image, which are the channels of one pixel, and where they go.
struct Part {
  at::Tensor tensor;  // keeps the memory alive
  const char* data;
  int64_t ld;
  int64_t bytes;
  int64_t offset;
};

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

void check(const std::vector<at::Tensor>& parts) {
  const at::Tensor& first = parts[0];
  TORCH_CHECK(first.dim() == 4 || first.dim() == 5, "images must have 4 or 5 axes, not ",
              first.dim());
  const at::ScalarType type = first.scalar_type();
  TORCH_CHECK(type == at::kChar || type == at::kByte, "images must be int8 or uint8, not ", type);
  for (const at::Tensor& part : parts) {
    bool same = part.dim() == first.dim() && part.scalar_type() == type;
    for (int64_t axis = 0; same && axis < first.dim(); ++axis) {
      same = axis == kChannels || part.size(axis) == first.size(axis);
    }
    TORCH_CHECK(same, "images may differ in their channels only: ", part.scalar_type(), " ",
                part.sizes(), " beside ", type, " ", first.sizes());
  }
}

template <int64_t Bytes>
void copy_of(const char* from, int64_t from_ld, char* to, int64_t to_ld, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * to_ld, from + i * from_ld, Bytes);
}

void copy(const Part& part, int64_t row, int64_t rows, char* to, int64_t ld) {
  const char* from = part.data + row * part.ld;
  to += row * ld + part.offset;
  switch (part.bytes) {
    case 16:
      return copy_of<16>(from, part.ld, to, ld, rows);
    case 32:
      return copy_of<32>(from, part.ld, to, ld, rows);
    case 64:
      return copy_of<64>(from, part.ld, to, ld, rows);
    default:
      for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * ld, from + i * part.ld, part.bytes);
  }
}

}  // namespace

at::Tensor cat_channels(const std::vector<at::Tensor>& parts) {
  check(parts);
  const bool flat = parts[0].dim() == 4;
  const auto format = flat ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  std::vector<int64_t> shape = parts[0].sizes().vec();
  shape[kChannels] = 0;
  for (const at::Tensor& part : parts) shape[kChannels] += part.size(kChannels);
  const int64_t ld = shape[kChannels];
  const at::Tensor result = at::empty(shape, parts[0].options(), format);
  if (result.numel() == 0) return result;
  std::vector<Part> rows;
  int64_t offset = 0;
  for (const at::Tensor& part : parts) {
    const int64_t bytes = part.size(kChannels);
    if (bytes == 0) continue;
    std::optional<int64_t> distance = distance_of_pixels(part);
    const at::Tensor tensor = distance ? part : part.contiguous(format);
    if (!distance) distance = distance_of_pixels(tensor);
    TORCH_CHECK(distance, "a contiguous part has no fixed distance of pixels");
    rows.push_back({tensor, static_cast<const char*>(tensor.const_data_ptr()), *distance, bytes,
                    offset});
    offset += bytes;
  }
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  at::parallel_for(0, result.numel() / ld, grain_of_bytes(ld), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += kStrip) {
      for (const Part& part : rows) copy(part, row, std::min(kStrip, end - row), to, ld);
    }
  });
  return result;
}

}  // namespace qfuse
