#include "convolution/layout.h"

#include "quantized/stored.h"
#include "tensors.h"

namespace qfuse {
namespace {

// The strides of a tensor of the shape [images, channels, spatial...] or [channels, spatial...].
Strides strides_of(const at::Tensor& t, const Geometry& g) {
  const auto strides = t.strides();
  Strides found{g.batched ? strides[0] : 0, {0, 0, 0}};
  std::copy(strides.end() - g.spatial, strides.end(), found.axis.end() - g.spatial);
  return found;
}

int64_t channel_axis(const Geometry& g) { return g.batched ? 1 : 0; }

bool has_adjacent_channels(const at::Tensor& t, const Geometry& g) {
  const int64_t axis = channel_axis(g);
  return t.size(axis) <= 1 || t.stride(axis) == 1;
}

// The same values with adjacent channels.
at::Tensor channels_last(const at::Tensor& t, const Geometry& g) {
  const int64_t axis = channel_axis(g);
  return t.movedim(axis, -1).contiguous().movedim(-1, axis);
}

bool is_channels_last(at::MemoryFormat format) {
  return format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d;
}

}  // namespace

std::optional<int64_t> Strides::row(const std::array<int64_t, kAxes>& size) const {
  int64_t pixels = 1;
  int64_t step = 0;
  for (size_t i = kAxes; i-- > 0;) {
    if (size[i] == 1) continue;
    if (pixels == 1) {
      step = axis[i];
    } else if (axis[i] != step * pixels) {
      return std::nullopt;
    }
    pixels *= size[i];
  }
  return step;
}

Pixels pixels_of(const at::Tensor& x, const Geometry& g) {
  const at::Tensor tensor = has_adjacent_channels(x, g) ? x : channels_last(x, g);
  const auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
  int64_t extent = tensor.numel() > 0 ? 1 : 0;
  for (int64_t i = 0; extent > 0 && i < tensor.dim(); ++i) {
    extent += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const auto size = static_cast<int64_t>(tensor.element_size());
  Strides strides = strides_of(tensor, g);
  strides.image *= size;
  for (int64_t& stride : strides.axis) stride *= size;
  return {tensor, data, data + extent * size, strides};
}

std::optional<int64_t> read_in_order(const Geometry& g, const Pixels& x) {
  for (const Phase& phase : g.phases) {
    for (const Line& line : phase.line) {
      const bool same = line.taps == 1 && line.first == 0 && line.step == 1 && line.out_step == 1;
      if (!same) return std::nullopt;
    }
  }
  const auto row = x.strides.row(g.in);
  if (!row || g.in != g.out) return std::nullopt;
  const bool one = g.pixels() == 1;
  if (!one && g.images > 1 && x.strides.image != *row * g.pixels()) return std::nullopt;
  return one ? x.strides.image : *row;
}

Extra extra_of(const at::Tensor& extra, const Geometry& g, std::vector<at::Tensor>& kept) {
  TORCH_CHECK(extra.dim() >= 1, "an extra must have at least one axis");
  const std::vector<int64_t> shape = g.shape();
  at::Tensor spread = extra.sizes() == at::IntArrayRef(shape) ? extra : extra.expand(shape);
  if (!has_adjacent_channels(spread, g) || !strides_of(spread, g).row(g.out)) {
    spread = channels_last(spread, g);
  }
  const Strides strides = strides_of(spread, g);
  kept.push_back(spread);
  const Element type = element_of(spread.scalar_type(), "an extra");
  return {{spread.const_data_ptr(), *strides.row(g.out), type}, strides.image};
}

Result result_of(const at::Tensor& x, const Geometry& g, at::ScalarType type) {
  const at::MemoryFormat format = x.suggest_memory_format();
  const bool last = g.batched && is_channels_last(format);
  const auto options = x.options().dtype(type);
  const at::Tensor result =
      empty_tensor(g.shape(), options, last ? format : at::MemoryFormat::Contiguous);
  const bool same = last || g.features == 1 || g.pixels() == 1;
  const int64_t count = g.images * g.pixels();
  return {result, same ? result : empty_tensor({count, g.features}, options)};
}

at::Tensor finished(const Result& r, const Geometry& g) {
  if (r.rows.const_data_ptr() == r.result.const_data_ptr()) return r.result;
  const at::Tensor planes = r.result.view({g.images, g.features, g.pixels()});
  planes.copy_(r.rows.view({g.images, g.pixels(), g.features}).transpose(1, 2));
  return r.result;
}

}  // namespace qfuse
