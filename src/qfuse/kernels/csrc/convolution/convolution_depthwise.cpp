#include "convolution/convolution_depthwise.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "convolution/destination.h"
#include "convolution/layout.h"
#include "isa/select.h"
#include "linear/buffer.h"
#include "linear/grain.h"
#include "parallel.h"

namespace qfuse {
namespace {

constexpr int64_t kStrip = 32;      // output pixels of a line that are computed at once
constexpr int64_t kReadAhead = 64;  // bytes of a pixel that a path may read at most
constexpr int64_t kTaps = 4;        // of a group

// Bytes of a pixel that a path may read for so many channels. See DepthwiseTile.
int64_t bytes_read(int64_t channels) { return channels <= 16 ? 16 : channels <= 32 ? 32 : 64; }

// A tap of the packed weight, by line (z, y) and place in it; those without a weight fill groups.
struct Tap {
  int64_t line;
  int64_t at;
  bool real;
};

// So many taps of a line begin a new group of four. See pack_depthwise.
bool starts_groups(const Line& line) { return line.taps >= 3; }

// Groups of a line of taps if the following output pixel reads one pixel further, and the last
// group has room for that; else 0.
int64_t shared_groups(const Line& line) {
  const bool slides = line.step == 1 && line.tap_step == 1 && starts_groups(line);
  return slides && line.taps % kTaps != 0 ? line.taps / kTaps + 1 : 0;
}

// In the order of the packed weight. What fills a line is the pixel that the following output pixel
// reads.
std::vector<Tap> taps_of(const Phase& phase) {
  const Line& line = phase.line[2];
  const int64_t filler = shared_groups(line) > 0 ? line.taps : 0;
  std::vector<Tap> order;
  for (int64_t i = 0; i < phase.line[0].taps * phase.line[1].taps; ++i) {
    for (int64_t at = 0; at < line.taps; ++at) order.push_back({i, at, true});
    while (starts_groups(line) && order.size() % kTaps != 0) order.push_back({i, filler, false});
  }
  while (order.size() % kTaps != 0) order.push_back({0, 0, false});
  return order;
}

// A packed weight with the taps of each line moved by one.
std::vector<uint32_t> shifted(const void* packed, int64_t groups, int64_t groups_of_line) {
  const auto* words = static_cast<const uint32_t*>(packed);
  std::vector<uint32_t> moved(groups * kBlock);
  for (int64_t g = 0; g < groups; ++g) {
    const bool first = g % groups_of_line == 0;
    for (int64_t i = g * kBlock; i < (g + 1) * kBlock; ++i) {
      moved[i] = words[i] << 8 | (first ? 0 : words[i - kBlock] >> 24);
    }
  }
  return moved;
}

struct Problem {
  const Int8Operands& operands;
  const Geometry& g;
  const Path& path;
  const Finish& finish;
  const int32_t* w_zero;  // one per output channel, or null
  Pixels x;
  const Phase& phase;
  uint8_t zero;         // the byte of the zero point
  int64_t multiple;     // output channels per input channel
  int64_t blocks;       // of output channels
  int64_t groups = 0;   // of taps
  int64_t strip;        // output pixels
  int64_t strips;       // of a line
  int64_t lines;        // of taps
  int64_t width;        // input pixels of a line that a strip reads, and the following one
  std::vector<int32_t> tap;  // indices in the table of input pixels
  std::vector<int8_t> ones;  // a packed weight that adds up the taps
  std::vector<uint32_t> next;       // the packed weight for the following output pixel
  std::vector<uint32_t> next_ones;  // and of `ones`

  Problem(const Int8Operands& o, const Geometry& geometry, const Finish& f, const int32_t* w_zeros)
      : operands(o),
        g(geometry),
        path(path_for(g.images * g.pixels())),
        finish(f),
        w_zero(w_zeros),
        x(pixels_of(o.x, g)),
        phase(g.phases[0]),
        zero(static_cast<uint8_t>(f.x_zero ^ flip_of(o.x))),
        multiple(g.out_channels()),
        blocks((g.features + kBlock - 1) / kBlock),
        strip(std::min(kStrip, phase.line[2].pixels)),
        strips((phase.line[2].pixels + strip - 1) / strip),
        lines(phase.line[0].taps * phase.line[1].taps) {
    const Line& line = phase.line[2];
    width = (strip - 1) * line.step + (line.taps - 1) * line.tap_step + 2;
    const std::vector<Tap> order = taps_of(phase);
    groups = static_cast<int64_t>(order.size()) / kTaps;
    for (const Tap& t : order) {
      const int64_t at = t.line * width + t.at * line.tap_step;
      tap.push_back(static_cast<int32_t>(at));
    }
    const int64_t shared = shared_groups(line);
    if (shared > 0) next = shifted(o.w_packed.const_data_ptr(), blocks * groups, shared);
    if (!w_zero) return;
    ones.resize(groups * kBlock * kTaps);
    for (size_t i = 0; i < ones.size(); ++i) {
      ones[i] = order[i / (kBlock * kTaps) * kTaps + i % kTaps].real;
    }
    if (shared > 0) next_ones = shifted(ones.data(), groups, shared);
  }
};

// Computes units, each of which is one strip of output pixels and one block of channels.
class Worker {
 public:
  explicit Worker(const Problem& p)
      : p_(p),
        zeros_(p.g.channels + kReadAhead),
        sums_(p.strip * kBlock * sizeof(int32_t)),
        taps_(p.w_zero ? p.strip * kBlock * sizeof(int32_t) : 0),
        table_(p.lines * p.width),
        moved_(p.lines * p.width),
        copies_(p.lines * p.width * kReadAhead),
        destination_(p.finish, p.g) {
    std::memset(zeros_.get(), p.zero, p.g.channels + kReadAhead);
  }

  void run(int64_t unit) {
    const int64_t strip = unit / p_.blocks;
    if (strip != strip_) point(strip);
    multiply(unit % p_.blocks);
  }

 private:
  // Finds the input pixels of a strip.
  void point(int64_t strip) {
    strip_ = strip;
    const auto& [lz, ly, lx] = p_.phase.line;
    const int64_t line = strip / p_.strips;
    const int64_t start = strip % p_.strips * p_.strip;
    count_ = std::min(p_.strip, lx.pixels - start);
    first_ = line * lx.pixels + start;
    const int64_t image = line / (lz.pixels * ly.pixels);
    const int64_t z = line / ly.pixels % lz.pixels * lz.step + lz.first;
    const int64_t y = line % ly.pixels * ly.step + ly.first;
    const int64_t x = start * lx.step + lx.first;
    used_ = (count_ - 1) * lx.step + (lx.taps - 1) * lx.tap_step + 2;
    last_ = 0;
    const auto* zeros = zeros_.as<uint8_t>();
    for (int64_t t = 0; t < p_.lines; ++t) {
      const uint8_t** to = table_.data() + t * p_.width;
      const int64_t in_z = z + t / ly.taps * lz.tap_step;
      const int64_t in_y = y + t % ly.taps * ly.tap_step;
      const bool inside = in_z >= 0 && in_z < p_.g.in[0] && in_y >= 0 && in_y < p_.g.in[1];
      const int64_t begin = inside ? std::clamp<int64_t>(-x, 0, used_) : used_;
      const int64_t end = inside ? std::clamp(p_.g.in[2] - x, begin, used_) : used_;
      const auto& strides = p_.x.strides;
      const int64_t from = image * strides.image + in_z * strides.axis[0] +
                           in_y * strides.axis[1] + x * strides.axis[2];
      std::fill(to, to + begin, zeros);
      const uint8_t* pixel = p_.x.data + from + begin * strides.axis[2];
      for (int64_t i = begin; i < end; ++i, pixel += strides.axis[2]) to[i] = pixel;
      std::fill(to + end, to + used_, zeros);
      if (begin < end) last_ = std::max(last_, from + (end - 1) * strides.axis[2]);
    }
  }

  // The table for a block of channels: pixels are copied where their channels are repeated, or
  // where a path would read past the end of the memory.
  const uint8_t* const* table(int64_t channel, int64_t channels, int64_t* offset) {
    const int64_t bytes = p_.x.end - p_.x.data;
    *offset = channel;
    const int64_t end = last_ + channel + bytes_read(channels);
    if (p_.multiple == 1 && end <= bytes) return table_.data();
    *offset = 0;
    for (int64_t t = 0; t < p_.lines; ++t) {
      for (int64_t i = t * p_.width; i < t * p_.width + used_; ++i) {
        uint8_t* copy = copies_.as<uint8_t>() + i * kReadAhead;
        for (int64_t c = 0; c < channels; ++c) copy[c] = table_[i][(channel + c) / p_.multiple];
        moved_[i] = copy;
      }
    }
    return moved_.data();
  }

  void multiply(int64_t block) {
    const int64_t channel = block * kBlock;
    const int64_t channels = std::min(kBlock, p_.g.features - channel);
    int64_t offset = 0;
    const uint8_t* const* pixels = table(channel, channels, &offset);
    const int64_t weight = block * p_.groups * kBlock;  // in words of four taps
    const auto bytes = [](const std::vector<uint32_t>& words, int64_t at) {
      return words.empty() ? nullptr : reinterpret_cast<const int8_t*>(words.data() + at);
    };
    DepthwiseTile tile{pixels,
                       p_.tap.data(),
                       p_.phase.line[2].step,
                       p_.groups,
                       offset,
                       channels,
                       count_,
                       p_.operands.w_packed.const_data_ptr<int8_t>() + weight * kTaps,
                       bytes(p_.next, weight),
                       flip_of(p_.operands.x) != 0};
    const int32_t* w_sums = p_.finish.epilogue.w_sums;
    if (!p_.w_zero && destination_.multiply(p_.path, p_.phase, first_, tile, channel, w_sums)) return;
    auto* sums = sums_.as<int32_t>();
    p_.path.depthwise(tile, sums);
    if (p_.w_zero) {
      tile.weight = p_.ones.data();
      tile.next = bytes(p_.next_ones, 0);
      p_.path.depthwise(tile, taps_.as<int32_t>());
      subtract(p_.w_zero + channel, channels);
    }
    destination_.write(p_.path, p_.phase, first_, count_, channel, channels, sums,
                       w_sums, nullptr);
  }

  // Subtracts the zero point of the weight times the sum of the taps, which differs by channel.
  void subtract(const int32_t* w_zero, int64_t channels) {
    auto* sums = sums_.as<int32_t>();
    const auto* taps = taps_.as<int32_t>();
    for (int64_t i = 0; i < count_; ++i) {
      for (int64_t c = 0; c < channels; ++c) sums[i * kBlock + c] -= w_zero[c] * taps[i * kBlock + c];
    }
  }

  const Problem& p_;
  const Buffer zeros_;
  const Buffer sums_;
  const Buffer taps_;
  std::vector<const uint8_t*> table_;  // input pixels, [lines][width]
  std::vector<const uint8_t*> moved_;
  const Buffer copies_;
  Destination destination_;
  int64_t strip_ = -1;
  int64_t first_ = 0;  // output pixel
  int64_t count_ = 0;
  int64_t used_ = 0;  // entries of a line of the table
  int64_t last_ = 0;  // offset of the last input pixel
};

void run(const Problem& p) {
  const int64_t lines = p.g.images * p.phase.line[0].pixels * p.phase.line[1].pixels;
  const int64_t cycles = p.strip * (p.groups * 12 + 40) + 200;
  parallel_for(0, lines * p.strips * p.blocks, grain_of_cycles(cycles),
               [&](int64_t begin, int64_t end) {
                 Worker worker(p);
                 for (int64_t i = begin; i < end; ++i) worker.run(i);
               });
}

void check(const Int8Operands& o, const Geometry& g) {
  check_int8(o, g.phases[0].taps());
  const auto groups = static_cast<int64_t>(taps_of(g.phases[0]).size()) / kTaps;
  const int64_t blocks = (g.features + kBlock - 1) / kBlock;
  TORCH_CHECK(o.w_packed.scalar_type() == at::kChar && o.w_packed.is_contiguous() &&
                  o.w_packed.sizes() == at::IntArrayRef({blocks, groups, kBlock, kTaps}),
              "w_packed must be contiguous int8 [ceil(N / 64), groups of taps, 64, 4] with N = ",
              g.features, " (elements of w_sums) and ", groups, " groups of taps, not ",
              o.w_packed.scalar_type(), " ", o.w_packed.sizes());
}

}  // namespace

at::Tensor convolution_depthwise_w8a8(const Int8Operands& o, const Window& window,
                                      const Output* output, at::ScalarType out_dtype) {
  TORCH_CHECK(o.w_sums.scalar_type() == at::kInt && o.w_sums.dim() == 1 && o.w_sums.is_contiguous(),
              "w_sums must be contiguous int32 [N]");
  const auto axes = static_cast<int64_t>(window.kernel.size());
  const std::vector<int64_t> no_padding(axes, 0);
  Window whole = window;
  whole.output_padding = no_padding;
  whole.transposed = false;
  whole.groups = o.x.dim() > axes ? o.x.size(o.x.dim() - axes - 1) : 1;
  const Geometry g = geometry_of(o.x, o.w_sums.numel(), whole);
  check(o, g);
  Finish finish(o, g);
  const int32_t* w_zero = std::exchange(finish.epilogue.w_zero, nullptr);
  return convolved(o.x, g, finish, output, out_dtype, [&] { run(Problem(o, g, finish, w_zero)); });
}

}  // namespace qfuse
