#include "convolution/convolution_w8a8.h"

#include <algorithm>
#include <vector>

#include "convolution/destination.h"
#include "convolution/layout.h"
#include "convolution/patches.h"
#include "isa/select.h"
#include "linear/buffer.h"
#include "linear/grain.h"
#include "parallel.h"

namespace qfuse {
namespace {

// A panel stays in the L2 cache together with a block of weights. With so many rows, reading the
// weights for each panel from a farther cache costs less than multiplying.
constexpr int64_t kPanelBytes = 256 << 10;
constexpr int64_t kPanelRows = 96;
constexpr int64_t kPanelsPerThread = 4;
// Rows that are finished at once: several tiles, whose sums stay in the L1 cache. With few products
// for each sum, the start of finishing counts, and the cache has more space.
constexpr int64_t kFinishRows = 24;
constexpr int64_t kShallowFinishRows = 48;
constexpr int64_t kShallow = 256;  // products of a sum

// The matrix product of a phase, split into panels of rows.
struct Part {
  const Phase& phase;
  int64_t rows;    // output pixels of all images
  int64_t k;       // taps * channels of a group
  int64_t depth;   // groups of four k
  int64_t weight;  // offset of the phase in a block, in groups of four k
  int64_t tile;    // rows of a tile
  int64_t panels;
  int64_t first;   // index of the first unit

  // Panels have an equal number of tiles, or one more: threads with as many panels have about as
  // much to do.
  int64_t row_of_panel(int64_t i) const { return std::min(tiles() * i / panels * tile, rows); }
  int64_t most_rows() const {
    return std::min((tiles() + panels - 1) / panels * tile, rows);
  }
  int64_t tiles() const { return (rows + tile - 1) / tile; }
};

// Where the rows of a patch matrix are.
struct Matrix {
  const uint8_t* data;
  int64_t ld;
  uint32_t flip;
};

// Scales along K.
struct Scales {
  const float* scale;  // [groups][blocks][count][64]
  const int16_t* short_sums;
  const int32_t* long_sums;
  int64_t count;  // of a block, for all phases
  int64_t depth;  // groups of four k that share one
};

struct Problem {
  const Int8Operands& operands;
  const Geometry& g;
  const Path& path;
  const Finish& finish;
  const Scales* scales;  // null if they differ by output channel only
  const int8_t* w;
  Pixels x;
  std::vector<Part> parts;
  int64_t blocks;  // of a group
  int64_t depth;   // groups of four k of a block of weights
  int64_t units = 0;
  bool direct;  // rows of pixels are rows of the matrix
  int64_t pixel_ld = 0;

  Problem(const Int8Operands& o, const Geometry& geometry, const Path& used, const Finish& f,
          const Scales* along = nullptr);

  // Whether the kernels take unsigned bytes only.
  bool unsigned_only() const { return scales && !path.keeps_sign; }
};

int64_t groups_of(int64_t k) { return (k + kGroup - 1) / kGroup; }

// Panels of as many rows as stay in the cache, but more if threads would have nothing to do.
int64_t panels_of(const Problem& p, int64_t rows, int64_t k) {
  const int64_t tile = p.path.tile_rows(rows);
  const int64_t fit = kPanelBytes / std::max<int64_t>(k, 1) / tile * tile;
  const int64_t most = std::max(tile, std::min(fit, std::max(tile, kPanelRows)));
  const int64_t threads = at::get_num_threads();
  const int64_t columns = p.blocks * p.g.groups;
  const int64_t enough = (kPanelsPerThread * threads + columns - 1) / columns;
  const int64_t panels = std::max((rows + most - 1) / most, std::min(enough, rows / tile));
  const int64_t even = columns % threads == 0 ? panels : (panels + threads - 1) / threads * threads;
  return std::max<int64_t>(1, std::min(even, (rows + tile - 1) / tile));
}

int64_t depth_of(const Geometry& g) {
  int64_t depth = 0;
  for (const Phase& phase : g.phases) depth += groups_of(phase.taps() * g.in_channels());
  return depth;
}

Problem::Problem(const Int8Operands& o, const Geometry& geometry, const Path& used,
                 const Finish& f, const Scales* along)
    : operands(o),
      g(geometry),
      path(used),
      finish(f),
      scales(along),
      w(o.w_packed.const_data_ptr<int8_t>()),
      x(pixels_of(o.x, g)),
      blocks((g.out_channels() + kBlock - 1) / kBlock),
      depth(depth_of(g)) {
  const int64_t c = g.in_channels();
  const std::optional<int64_t> distance = read_in_order(g, x);
  pixel_ld = distance.value_or(0);
  direct = distance && c % kGroup == 0 &&
           (!unsigned_only() || (flip_of(o.x) == 0 && pixel_ld >= c));
  int64_t weight = 0;
  for (const Phase& phase : g.phases) {
    const int64_t k = phase.taps() * c;
    const int64_t rows = phase.pixels() * g.images;
    if (rows > 0) {
      const int64_t panels = panels_of(*this, rows, k);
      parts.push_back(
          {phase, rows, k, groups_of(k), weight, path.tile_rows(rows), panels, units});
      units += panels * g.groups * blocks;
    }
    weight += groups_of(k);
  }
}

int64_t features_of(const Int8Operands& o, const Window& window) {
  const int64_t axes = window.transposed ? 2 : 1;
  TORCH_CHECK(o.w_sums.scalar_type() == at::kInt && o.w_sums.dim() == axes &&
                  o.w_sums.is_contiguous(),
              "w_sums must be contiguous int32 ", axes == 1 ? "[N]" : "[phases, N]");
  return o.w_sums.size(axes - 1);
}

void check_packed(const Int8Operands& o, const Geometry& g) {
  int64_t k = 0;
  for (const Phase& phase : g.phases) k = std::max(k, phase.taps() * g.in_channels());
  check_int8(o, k);
  const int64_t blocks = (g.out_channels() + kBlock - 1) / kBlock;
  TORCH_CHECK(o.w_packed.scalar_type() == at::kChar && o.w_packed.is_contiguous() &&
                  o.w_packed.sizes() ==
                      at::IntArrayRef({g.groups, blocks, depth_of(g), kBlock, kGroup}),
              "w_packed must be contiguous int8 [groups, ceil(N / groups / 64), ceil(K / 4), 64, 4]"
              " with N = ", g.features, " (last axis of w_sums) and K = ", k,
              " (taps * channels / groups), not ", o.w_packed.scalar_type(), " ",
              o.w_packed.sizes());
}

void check(const Int8Operands& o, const Geometry& g, const Window& window) {
  check_packed(o, g);
  TORCH_CHECK(!window.transposed || o.w_sums.size(0) == static_cast<int64_t>(g.phases.size()),
              "w_sums has ", o.w_sums.size(0), " rows, expected one for each of the ",
              g.phases.size(), " phases");
}

Scales scales_of(const Int8Operands& o, const Geometry& g) {
  const int64_t blocks = (g.out_channels() + kBlock - 1) / kBlock;
  const int64_t count = o.w_scale.dim() == 4 ? o.w_scale.size(2) : 0;
  const std::vector<int64_t> shape{g.groups, blocks, count, kBlock};
  const bool are_short = o.w_sums.scalar_type() == at::kShort;
  TORCH_CHECK(count >= 1 && o.w_scale.scalar_type() == at::kFloat && o.w_scale.is_contiguous() &&
                  o.w_scale.sizes() == at::IntArrayRef(shape),
              "w_scale must be contiguous float32 [groups, ceil(N / groups / 64), scales, 64], not ",
              o.w_scale.scalar_type(), " ", o.w_scale.sizes());
  TORCH_CHECK((are_short || o.w_sums.scalar_type() == at::kInt) && o.w_sums.is_contiguous() &&
                  o.w_sums.sizes() == at::IntArrayRef(shape),
              "w_sums must be contiguous int16 or int32 ", at::IntArrayRef(shape), ", not ",
              o.w_sums.scalar_type(), " ", o.w_sums.sizes());
  const int64_t depth = depth_of(g) / count;
  TORCH_CHECK(depth > 0 && depth_of(g) % count == 0 && g.in_channels() % (depth * kGroup) == 0,
              count, " scales of an output channel must each be of a multiple of ", kGroup,
              " input channels that divides the ", g.in_channels(), " of a group");
  return {o.w_scale.const_data_ptr<float>(),
          are_short ? o.w_sums.const_data_ptr<int16_t>() : nullptr,
          are_short ? nullptr : o.w_sums.const_data_ptr<int32_t>(), count, depth};
}

// Computes units, each of which is one panel times one block of weights. Results depend neither on
// their order nor on the threads.
class Worker {
 public:
  explicit Worker(const Problem& p)
      : p_(p),
        panel_(panel_bytes(p)),
        sums_(finish_rows(p) * kBlock * sizeof(int32_t)),
        x_sums_(panel_rows(p) * sizeof(int32_t)),
        group_sums_(p.scales ? finish_rows(p) * kBlock * sizeof(int32_t) : 0),
        zeros_(p.scales ? finish_rows(p) * sizeof(int32_t) : 0),
        destination_(p.finish, p.g) {
    if (p.scales) std::fill_n(zeros_.as<int32_t>(), finish_rows(p), p.finish.multiplied_zero);
  }

  void run(int64_t unit) {
    while (part_ + 1 < p_.parts.size() && unit >= p_.parts[part_ + 1].first) ++part_;
    const Part& part = p_.parts[part_];
    unit -= part.first;
    const int64_t block = unit % p_.blocks;
    const int64_t group = unit / p_.blocks % p_.g.groups;
    const int64_t panel = unit / p_.blocks / p_.g.groups;
    const int64_t first = part.row_of_panel(panel);
    const int64_t rows = part.row_of_panel(panel + 1) - first;
    if (&part != known_.part || first != known_.first || group != known_.group) {
      matrix_ = read(part, first, rows, group);
      known_ = {&part, first, group};
    }
    multiply(part, first, rows, group, block);
  }

 private:
  struct Known {
    const Part* part;
    int64_t first;
    int64_t group;
  };

  static int64_t panel_rows(const Problem& p) {
    int64_t most = 0;
    for (const Part& part : p.parts) most = std::max(most, part.most_rows());
    return most;
  }

  static int64_t finish_rows(const Problem& p) {
    int64_t most = 0;
    for (const Part& part : p.parts) most = std::max(most, finish_rows(p, part));
    return most;
  }

  // A multiple of a tile's.
  static int64_t finish_rows(const Problem& p, const Part& part) {
    const int64_t tile = p.path.tile_rows(part.rows);
    const int64_t rows = part.k <= kShallow ? kShallowFinishRows : kFinishRows;
    return (rows + tile - 1) / tile * tile;
  }

  static int64_t panel_bytes(const Problem& p) {
    int64_t most = 0;
    for (const Part& part : p.parts) {
      most = std::max(most, part.most_rows() * part.depth * kGroup);
    }
    return p.direct ? 0 : most + kPanelSlack;
  }

  // Makes the panel, and the sums of its rows if weights have zero points.
  Matrix read(const Part& part, int64_t first, int64_t rows, int64_t group) {
    const uint32_t flip = flip_of(p_.operands.x);
    const int64_t channel = group * p_.g.in_channels();
    Matrix matrix{p_.x.data + first * p_.pixel_ld + channel, p_.pixel_ld, flip};
    if (!p_.direct) {
      const int64_t ld = part.depth * kGroup;
      auto* panel = panel_.as<uint8_t>();
      const auto zero = static_cast<uint8_t>(p_.finish.x_zero ^ flip);
      gather(p_.path, {p_.x, p_.g.in, part.phase, p_.g.in_channels(), zero}, first, rows, channel, panel, ld);
      matrix = {panel, ld, flip};
      if (p_.unsigned_only() && flip) {
        for (int64_t i = 0; i < rows * ld; ++i) panel[i] ^= 0x80;
        matrix.flip = 0;
      }
    }
    if (p_.finish.epilogue.w_zero) {
      sum_rows(matrix.data, matrix.ld, rows, part.k, matrix.flip, shift_of(matrix.flip, p_.path),
               x_sums_.as<int32_t>());
    }
    return matrix;
  }

  void multiply(const Part& part, int64_t first, int64_t rows, int64_t group, int64_t block) {
    const int64_t tile = p_.path.tile_rows(part.rows);
    const int64_t column = group * p_.g.out_channels() + block * kBlock;
    const int64_t columns = std::min(kBlock, p_.g.out_channels() - block * kBlock);
    const int64_t depth = (group * p_.blocks + block) * p_.depth + part.weight;
    const int8_t* weight = p_.w + depth * kBlock * kGroup;
    const int64_t phase = &part.phase - p_.g.phases.data();
    const int32_t* w_sums = p_.scales ? nullptr : p_.finish.epilogue.w_sums + phase * p_.g.features;
    const Groups groups = p_.scales ? groups_of(part, group * p_.blocks + block) : Groups{};
    const int32_t* x_sums = p_.finish.epilogue.w_zero ? x_sums_.as<int32_t>() : nullptr;
    Following next = weights_behind(part, group * p_.blocks + block, weight);
    const Tile all{matrix_.data, matrix_.ld, matrix_.flip, rows, weight, part.depth, columns, &next};
    // Sums of rows are counted from the panel on.
    const bool at_once = !p_.scales && !x_sums;
    if (at_once && destination_.multiply(p_.path, part.phase, first, all, column, w_sums)) return;
    auto* sums = sums_.as<int32_t>();
    const int64_t step = finish_rows(p_, part);
    for (int64_t row = 0; row < rows; row += step) {
      const int64_t count = std::min(step, rows - row);
      const uint8_t* a = matrix_.data + row * matrix_.ld;
      for (int64_t i = 0; i < count; i += tile) {
        const Tile rows_of_tile{a + i * matrix_.ld, matrix_.ld, matrix_.flip,
                                std::min(tile, count - i), weight, part.depth, columns, &next};
        if (p_.scales) {
          multiply_groups(rows_of_tile, groups, reinterpret_cast<float*>(sums) + i * kBlock);
        } else {
          p_.path.multiply(rows_of_tile, sums + i * kBlock);
        }
      }
      destination_.write(p_.path, part.phase, first + row, count, column, columns, sums, w_sums,
                         x_sums ? x_sums + row : nullptr);
    }
  }

  // Those of the next block; none after the last one.
  Following weights_behind(const Part& part, int64_t block, const int8_t* weight) const {
    if (block + 1 == p_.blocks * p_.g.groups) return {};
    return {weight + p_.depth * kBlock * kGroup, part.depth * kBlock * kGroup};
  }

  // The scales of a block, counted over all groups, from a phase on.
  Groups groups_of(const Part& part, int64_t block) const {
    const Scales& s = *p_.scales;
    const int64_t first = (block * s.count + part.weight / s.depth) * kBlock;
    return {part.depth / s.depth,
            s.scale + first,
            s.short_sums ? s.short_sums + first : nullptr,
            s.long_sums ? s.long_sums + first : nullptr,
            nullptr,
            p_.finish.multiplied_zero == 0 ? nullptr : zeros_.as<int32_t>(),
            nullptr};
  }

  void multiply_groups(const Tile& t, const Groups& groups, float* totals) const {
    std::fill_n(totals, t.rows * kBlock, 0.0f);
    const int64_t depth = p_.scales->depth;
    if (p_.path.groups->bytes) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(t.b);
      return p_.path.groups->bytes({t.a, t.lda, t.rows, bytes, depth, groups, t.flip != 0}, totals);
    }
    auto* sums = group_sums_.as<int32_t>();
    for (int64_t g = 0; g < groups.count; ++g) {
      p_.path.multiply({t.a + g * depth * kGroup, t.lda, 0, t.rows,
                        t.b + g * depth * kGroup * kBlock, depth, kBlock},
                       sums);
      p_.path.groups->add(groups, g, sums, t.rows, totals);
    }
  }

  const Problem& p_;
  const Buffer panel_;
  const Buffer sums_;
  const Buffer x_sums_;
  const Buffer group_sums_;
  const Buffer zeros_;  // zero points of rows
  Destination destination_;
  size_t part_ = 0;
  Known known_{nullptr, 0, 0};
  Matrix matrix_{};
};

void run(const Problem& p) {
  int64_t cycles = 0;
  for (const Part& part : p.parts) {
    const int64_t unit = (part.depth + 8) * 4 * std::max<int64_t>(part.most_rows(), 3);
    cycles = std::max(cycles, unit + 200);
  }
  parallel_for(0, p.units, grain_of_cycles(cycles), [&](int64_t begin, int64_t end) {
    Worker worker(p);
    for (int64_t i = begin; i < end; ++i) worker.run(i);
    p.path.release();
  });
}

}  // namespace

at::Tensor convolution_w8a8(const Int8Operands& o, const Window& window, const Output* output,
                            at::ScalarType out_dtype) {
  const Geometry g = geometry_of(o.x, features_of(o, window), window);
  check(o, g, window);
  Finish finish(o, g);
  const Path& path = path_for(g.images * g.pixels());
  finish.multiplied_zero -= shift_of(flip_of(o.x), path);
  return convolved(o.x, g, finish, output, out_dtype, [&] {
    run(Problem(o, g, path, finish));
  });
}

at::Tensor convolution_w8a8_grouped(const Int8Operands& o, const Window& window,
                                    int64_t out_channels, const Output* output,
                                    at::ScalarType out_dtype) {
  const Geometry g = geometry_of(o.x, out_channels, window);
  check_packed(o, g);
  const Scales scales = scales_of(o, g);
  Finish finish(o, g, /*grouped=*/true);
  const Path& path = path_for(g.images * g.pixels());
  finish.multiplied_zero -= shift_of(flip_of(o.x), path);
  return convolved(o.x, g, finish, output, out_dtype, [&] {
    run(Problem(o, g, path, finish, &scales));
  });
}

}  // namespace qfuse
