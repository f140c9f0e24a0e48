#include "convolution/geometry.h"

#include <numeric>

namespace qfuse {
namespace {

// One axis of the arguments; a missing one leaves everything as it is.
struct Axis {
  int64_t in = 1;
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0;  // before
  int64_t after = 0;
  int64_t dilation = 1;
  int64_t output_padding = 0;

  int64_t reach() const { return dilation * (kernel - 1) + 1; }
};

void check_length(at::IntArrayRef values, size_t axes, int64_t least, const char* what) {
  TORCH_CHECK(values.size() == axes, what, " has ", values.size(), " numbers, expected ", axes);
  for (const int64_t value : values) {
    TORCH_CHECK(value >= least, what, " ", value, " is less than ", least);
  }
}

void check_window(const Window& w, size_t axes) {
  TORCH_CHECK(axes >= 1 && axes <= kAxes, "kernel has ", axes, " numbers, expected 1 to 3");
  check_length(w.kernel, axes, 1, "kernel");
  check_length(w.stride, axes, 1, "stride");
  const bool uneven = !w.transposed && w.padding.size() == 2 * axes;
  check_length(w.padding, uneven ? 2 * axes : axes, 0, "padding");
  check_length(w.dilation, axes, 1, "dilation");
  check_length(w.output_padding, axes, 0, "output_padding");
  TORCH_CHECK(w.groups >= 1, "groups ", w.groups, " is less than 1");
}

int64_t out_size(const Axis& a, bool transposed) {
  if (!transposed) {
    TORCH_CHECK(a.output_padding == 0, "output_padding is for transposed convolutions");
    const int64_t padded = a.in + a.padding + a.after;
    const int64_t room = padded - a.reach();
    TORCH_CHECK(room >= 0, "the kernel reaches over ", a.reach(), " pixels, more than the ",
                padded, " of the padded input");
    return room / a.stride + 1;
  }
  TORCH_CHECK(a.output_padding < a.stride || a.output_padding < a.dilation, "output_padding ",
              a.output_padding, " is not less than the stride or the dilation");
  const int64_t size = (a.in - 1) * a.stride - 2 * a.padding + a.reach() + a.output_padding;
  TORCH_CHECK(size >= 1, "the output would have ", size, " pixels along an axis");
  return size;
}

// Lines of one axis: one of an ordinary convolution, `stride` of a transposed one.
std::vector<Line> lines_of(const Axis& a, int64_t out, bool transposed) {
  if (!transposed) return {{out, 0, 1, a.kernel, -a.padding, a.stride, a.dilation}};
  std::vector<Line> lines;
  // Position t = output + padding reads input i through tap k if t = i * stride + k * dilation.
  const int64_t shared = std::gcd(a.stride, a.dilation);
  const int64_t spacing = a.stride / shared;  // between the taps of a phase
  for (int64_t rest = 0; rest < a.stride; ++rest) {
    const int64_t first = a.padding + ((rest - a.padding) % a.stride + a.stride) % a.stride;
    const int64_t out_first = first - a.padding;
    const int64_t pixels = out_first < out ? (out - out_first + a.stride - 1) / a.stride : 0;
    int64_t tap = 0;
    while (tap < spacing && (tap * a.dilation - rest) % a.stride != 0) ++tap;
    const int64_t taps =
        tap < spacing && tap < a.kernel ? (a.kernel - 1 - tap) / spacing + 1 : 0;
    const int64_t last = tap + (taps - 1) * spacing;
    const int64_t start = taps > 0 ? (first - last * a.dilation) / a.stride : 0;
    lines.push_back({pixels, out_first, a.stride, taps, start, 1, a.dilation / shared});
  }
  return lines;
}

}  // namespace

std::vector<int64_t> Geometry::shape() const {
  std::vector<int64_t> sizes;
  if (batched) sizes.push_back(images);
  sizes.push_back(features);
  sizes.insert(sizes.end(), out.end() - spatial, out.end());
  return sizes;
}

Geometry geometry_of(const at::Tensor& x, int64_t features, const Window& w) {
  const size_t axes = w.kernel.size();
  check_window(w, axes);
  const auto rank = static_cast<size_t>(x.dim());
  TORCH_CHECK(rank == axes + 1 || rank == axes + 2, "x has ", rank, " axes, expected ", axes + 1,
              " or ", axes + 2);
  Geometry g{};
  g.batched = rank == axes + 2;
  g.spatial = static_cast<int64_t>(axes);
  g.images = g.batched ? x.size(0) : 1;
  g.channels = x.size(g.batched ? 1 : 0);
  g.features = features;
  g.groups = w.groups;
  TORCH_CHECK(g.channels % g.groups == 0 && g.features % g.groups == 0, g.channels,
              " channels and ", g.features, " output channels cannot be split into ", g.groups,
              " groups");
  std::array<std::vector<Line>, kAxes> lines;
  for (size_t i = 0; i < kAxes; ++i) {
    Axis a;
    if (i + axes >= kAxes) {
      const size_t k = i + axes - kAxes;
      const size_t after = w.padding.size() == axes ? k : axes + k;
      a = {x.size(static_cast<int64_t>(rank - axes + k)),
           w.kernel[k],
           w.stride[k],
           w.padding[k],
           w.padding[after],
           w.dilation[k],
           w.output_padding[k]};
    }
    g.in[i] = a.in;
    g.out[i] = out_size(a, w.transposed);
    lines[i] = lines_of(a, g.out[i], w.transposed);
  }
  for (const Line& z : lines[0]) {
    for (const Line& y : lines[1]) {
      for (const Line& x_line : lines[2]) g.phases.push_back({{z, y, x_line}});
    }
  }
  return g;
}

}  // namespace qfuse
