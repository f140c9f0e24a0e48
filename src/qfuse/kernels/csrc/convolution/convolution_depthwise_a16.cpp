#include "convolution/convolution_depthwise_a16.h"

#include <algorithm>
#include <vector>

#include "linear/buffer.h"
#include "linear/grain.h"
#include "parallel.h"

namespace qfuse {
namespace {

constexpr int64_t kStrip = 32;  // output pixels of a line that are computed at once

// The output pixels of a phase, split into strips of lines.
struct Part {
  const Phase& phase;
  int64_t word;    // where the phase begins in a block of the weight
  int64_t depth;   // taps, padded to whole words
  int64_t strip;   // output pixels
  int64_t strips;  // of a line
  int64_t lines;   // of taps
  int64_t width;   // input pixels of a line of taps that a strip reads
  int64_t first;   // index of the first unit
  std::vector<int32_t> tap;  // indices in the table of input pixels
};

struct Problem {
  const RealConvolution& c;
  int64_t multiple;  // output channels per input channel
  int64_t blocks;
  int64_t units = 0;
  std::vector<Part> parts;

  explicit Problem(const RealConvolution& convolution)
      : c(convolution), multiple(c.g.out_channels()), blocks(c.weight.blocks()) {
    int64_t word = 0;
    for (const Phase& phase : c.g.phases) {
      const int64_t words = words_of(c.weight, c.g, phase);
      if (phase.pixels() > 0) add(phase, word, words);
      word += words;
    }
  }

 private:
  void add(const Phase& phase, int64_t word, int64_t words) {
    const auto& [z, y, x] = phase.line;
    Part part{phase, word, words * c.weight.codes_per_word(), std::min(kStrip, x.pixels), 0, 0, 0,
              units, {}};
    part.strips = (x.pixels + part.strip - 1) / part.strip;
    part.lines = z.taps * y.taps;
    part.width = (part.strip - 1) * x.step + std::max<int64_t>(x.taps - 1, 0) * x.tap_step + 1;
    for (int64_t line = 0; line < part.lines; ++line) {
      for (int64_t t = 0; t < x.taps; ++t) {
        part.tap.push_back(static_cast<int32_t>(line * part.width + t * x.tap_step));
      }
    }
    units += c.g.images * z.pixels * y.pixels * part.strips * blocks;
    parts.push_back(std::move(part));
  }
};

// Computes units, each of which is one strip of output pixels and one block of channels.
class Worker {
 public:
  explicit Worker(const Problem& p)
      : p_(p),
        zeros_(p.c.g.channels * sizeof(float)),
        panel_(most(p, [](const Part& part) { return part.depth; }) * kBlock * sizeof(float)),
        sums_(kStrip * kBlock * sizeof(float)),
        table_(most(p, [](const Part& part) { return part.lines * part.width; })),
        moved_(p.multiple > 1 ? table_.size() : 0),
        copies_(moved_.size() * kBlock * sizeof(float)),
        destination_(p.c.finish, p.c.g) {
    std::fill_n(zeros_.as<float>(), p.c.g.channels, 0.0f);
  }

  void run(int64_t unit) {
    while (part_ + 1 < p_.parts.size() && unit >= p_.parts[part_ + 1].first) ++part_;
    const Part& part = p_.parts[part_];
    const int64_t strip = (unit - part.first) / p_.blocks;
    if (&part != pointed_ || strip != strip_) point(part, strip);
    multiply(part, (unit - part.first) % p_.blocks);
  }

 private:
  template <class Size>
  static int64_t most(const Problem& p, const Size& size) {
    int64_t most = 0;
    for (const Part& part : p.parts) most = std::max(most, size(part));
    return most;
  }

  // Finds the input pixels of a strip.
  void point(const Part& part, int64_t strip) {
    pointed_ = &part;
    strip_ = strip;
    const auto& [lz, ly, lx] = part.phase.line;
    const auto& in = p_.c.g.in;
    const int64_t line = strip / part.strips;
    const int64_t start = strip % part.strips * part.strip;
    count_ = std::min(part.strip, lx.pixels - start);
    first_ = line * lx.pixels + start;
    const int64_t image = line / (lz.pixels * ly.pixels);
    const int64_t z = line / ly.pixels % lz.pixels * lz.step + lz.first;
    const int64_t y = line % ly.pixels * ly.step + ly.first;
    const int64_t x = start * lx.step + lx.first;
    const auto& strides = p_.c.x.strides;
    used_ = (count_ - 1) * lx.step + std::max<int64_t>(lx.taps - 1, 0) * lx.tap_step + 1;
    for (int64_t t = 0; t < part.lines; ++t) {
      const float** to = table_.data() + t * part.width;
      const int64_t in_z = z + t / ly.taps * lz.tap_step;
      const int64_t in_y = y + t % ly.taps * ly.tap_step;
      const bool inside = in_z >= 0 && in_z < in[0] && in_y >= 0 && in_y < in[1];
      const int64_t from = image * strides.image + in_z * strides.axis[0] + in_y * strides.axis[1];
      for (int64_t i = 0; i < used_; ++i) {
        const bool read = inside && x + i >= 0 && x + i < in[2];
        const uint8_t* pixel = p_.c.x.data + (read ? from + (x + i) * strides.axis[2] : 0);
        to[i] = read ? reinterpret_cast<const float*>(pixel) : zeros_.as<float>();
      }
    }
  }

  // The table for a block of channels: pixels are copied where their channels are repeated.
  const float* const* table(const Part& part, int64_t channel, int64_t channels) {
    if (p_.multiple == 1) return table_.data();
    for (int64_t t = 0; t < part.lines; ++t) {
      for (int64_t i = t * part.width; i < t * part.width + used_; ++i) {
        float* copy = copies_.as<float>() + i * kBlock;
        for (int64_t c = 0; c < channels; ++c) copy[c] = table_[i][(channel + c) / p_.multiple];
        moved_[i] = copy;
      }
    }
    return moved_.data();
  }

  void multiply(const Part& part, int64_t block) {
    const int64_t channel = block * kBlock;
    const int64_t channels = p_.c.weight.columns(block);
    auto* panel = panel_.as<float>();
    p_.c.kernels.widen(p_.c.weight.block(block, part.word), 0, part.depth, Real::f32, panel);
    const RealDepthwiseTile tile{table(part, channel, channels),
                                 part.tap.data(),
                                 part.phase.line[2].step,
                                 static_cast<int64_t>(part.tap.size()),
                                 p_.multiple == 1 ? channel : 0,
                                 channels,
                                 count_,
                                 panel};
    p_.c.path.real->depthwise(tile, sums_.as<float>());
    destination_.write(p_.c.path, part.phase, first_, count_, channel, channels, sums_.get(),
                       nullptr, nullptr);
  }

  const Problem& p_;
  const Buffer zeros_;
  const Buffer panel_;
  const Buffer sums_;
  std::vector<const float*> table_;  // input pixels, [lines][width]
  std::vector<const float*> moved_;
  const Buffer copies_;
  Destination destination_;
  size_t part_ = 0;
  const Part* pointed_ = nullptr;
  int64_t strip_ = 0;
  int64_t first_ = 0;  // output pixel
  int64_t count_ = 0;
  int64_t used_ = 0;  // entries of a line of the table
};

}  // namespace

void run_depthwise(const RealConvolution& c) {
  const Problem p(c);
  int64_t cycles = 0;
  for (const Part& part : p.parts) {
    cycles = std::max(cycles, part.strip * (part.depth * 4 + 40) + 200);
  }
  parallel_for(0, p.units, grain_of_cycles(cycles), [&](int64_t begin, int64_t end) {
    Worker worker(p);
    for (int64_t i = begin; i < end; ++i) worker.run(i);
  });
}

}  // namespace qfuse
