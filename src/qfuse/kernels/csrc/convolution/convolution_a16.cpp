#include "convolution/convolution_a16.h"

#include <algorithm>
#include <vector>

#include "convolution/convolution_depthwise_a16.h"
#include "convolution/patches.h"
#include "linear/buffer.h"
#include "linear/grain.h"
#include "parallel.h"

namespace qfuse {
namespace {

constexpr int64_t kSize = 4;     // bytes of a column of a panel, whatever its type: see RealTile
constexpr int64_t kDepth = 512;  // K per panel of weights, which stays in the L2 cache
// Rows that share a panel of weights: making it costs about as much as multiplying five rows.
constexpr int64_t kLeastRows = 48;
constexpr int64_t kMostRows = 192;
constexpr int64_t kPatchBytes = 512 << 10;  // of a panel of patches with more than kLeastRows
constexpr int64_t kPanelsPerThread = 3;

// The matrix product of a phase, split into panels of rows.
struct Part {
  const Phase& phase;
  int64_t rows;   // output pixels of all images
  int64_t k;      // taps * channels of a group
  int64_t depth;  // k, padded to whole words
  int64_t word;   // where the phase begins in a block of the weight
  int64_t panel;  // rows of a panel
  int64_t first;  // index of the first unit
};

// Adjacent output channels in one group and one block.
struct Piece {
  int64_t group;
  int64_t block;
  int64_t column;  // of the block
  int64_t columns;
};

std::vector<Piece> pieces_of(const Geometry& g) {
  std::vector<Piece> pieces;
  for (int64_t group = 0; group < g.groups; ++group) {
    const int64_t end = (group + 1) * g.out_channels();
    for (int64_t n = group * g.out_channels(); n < end;) {
      const int64_t block = n / kBlock;
      const int64_t next = std::min(end, (block + 1) * kBlock);
      pieces.push_back({group, block, n % kBlock, next - n});
      n = next;
    }
  }
  return pieces;
}

// As many rows as stay in the cache, but fewer if threads would have nothing to do.
int64_t rows_of_panel(int64_t rows, int64_t row_bytes, int64_t pieces) {
  const int64_t fit = kPatchBytes / std::max<int64_t>(row_bytes, 1) / kLeastRows * kLeastRows;
  int64_t panel = std::clamp(fit, kLeastRows, kMostRows);
  const int64_t enough = kPanelsPerThread * at::get_num_threads();
  while (panel > kLeastRows && (rows + panel - 1) / panel * pieces < enough) panel -= kLeastRows;
  return panel;
}

struct Problem {
  const RealConvolution& c;
  int64_t size;  // bytes of an element
  std::vector<Piece> pieces;
  std::vector<Part> parts;
  std::optional<int64_t> distance;  // of rows in bytes if pixels are rows of the matrix
  int64_t units = 0;

  explicit Problem(const RealConvolution& convolution)
      : c(convolution),
        size(bytes_of(c.type)),
        pieces(pieces_of(c.g)),
        distance(read_in_order(c.g, c.x)) {
    int64_t word = 0;
    for (const Phase& phase : c.g.phases) {
      const int64_t words = words_of(c.weight, c.g, phase);
      const int64_t depth = words * c.weight.codes_per_word();
      const int64_t rows = phase.pixels() * c.g.images;
      const int64_t k = phase.taps() * c.g.in_channels();
      if (distance && (k != depth || *distance < k * size)) distance.reset();
      if (rows > 0) {
        const auto count = static_cast<int64_t>(pieces.size());
        const int64_t panel = rows_of_panel(rows, depth * size, count);
        parts.push_back({phase, rows, k, depth, word, panel, units});
        units += (rows + panel - 1) / panel * count;
      }
      word += words;
    }
  }
};

// Rows of a patch matrix.
struct Matrix {
  const uint8_t* data;
  int64_t ld;  // in bytes
};

// Computes units, each of which is one panel of rows times one piece of the weight. Results depend
// neither on their order nor on the threads.
class Worker {
 public:
  explicit Worker(const Problem& p)
      : p_(p),
        patches_(p.distance ? 0 : most(p, [&](const Part& part) {
          return std::min(part.panel, part.rows) * part.depth * p.size;
        }) + kPanelSlack),
        weights_((most(p, [](const Part& part) { return std::min(part.depth, kDepth); }) + 1) *
                 kBlock * kSize),
        sums_(most(p, [](const Part& part) { return std::min(part.panel, part.rows); }) * kBlock *
              sizeof(float)),
        destination_(p.c.finish, p.c.g) {}

  void run(int64_t unit) {
    while (part_ + 1 < p_.parts.size() && unit >= p_.parts[part_ + 1].first) ++part_;
    const Part& part = p_.parts[part_];
    const auto count = static_cast<int64_t>(p_.pieces.size());
    const Piece& piece = p_.pieces[(unit - part.first) % count];
    const int64_t first = (unit - part.first) / count * part.panel;
    const int64_t rows = std::min(part.panel, part.rows - first);
    if (&part != read_.part || first != read_.first || piece.group != read_.group) {
      matrix_ = read(part, first, rows, piece.group);
      read_ = {&part, first, piece.group};
    }
    multiply(part, piece, rows);
    destination_.write(p_.c.path, part.phase, first, rows, piece.block * kBlock + piece.column,
                       piece.columns, sums_.get(), nullptr, nullptr);
  }

 private:
  struct Read {
    const Part* part;
    int64_t first;
    int64_t group;
  };
  struct Widened {
    const Part* part;
    int64_t block;
  };

  template <class Size>
  static int64_t most(const Problem& p, const Size& size) {
    int64_t most = 0;
    for (const Part& part : p.parts) most = std::max(most, size(part));
    return most;
  }

  Matrix read(const Part& part, int64_t first, int64_t rows, int64_t group) {
    const RealConvolution& c = p_.c;
    const int64_t bytes = c.g.in_channels() * p_.size;
    const int64_t channel = group * bytes;
    if (p_.distance) return {c.x.data + first * *p_.distance + channel, *p_.distance};
    const int64_t ld = part.depth * p_.size;
    auto* panel = patches_.as<uint8_t>();
    gather(c.path, {c.x, c.g.in, part.phase, bytes, 0}, first, rows, channel, panel, ld);
    // Weights there are undefined, and what is not a number would stay so times zero.
    const int64_t end = part.k * p_.size;
    for (int64_t i = 0; end < ld && i < rows; ++i) {
      std::fill(panel + i * ld + end, panel + (i + 1) * ld, uint8_t{0});
    }
    return {panel, ld};
  }

  void multiply(const Part& part, const Piece& piece, int64_t rows) {
    const RealConvolution& c = p_.c;
    const RealBlock block = c.weight.block(piece.block, part.word);
    const uint8_t* panel = weights_.as<uint8_t>() + piece.column * kSize;
    const bool known = widened_.part == &part && widened_.block == piece.block;
    const int64_t most = std::max<int64_t>(part.depth, 1);  // without K, sums have to be cleared
    for (int64_t k = 0; k < most; k += kDepth) {
      const int64_t depth = std::min(kDepth, part.depth - k);
      if (!known || most > kDepth) c.kernels.widen(block, k, depth, c.type, weights_.get());
      const RealTile tile{matrix_.data + k * p_.size, matrix_.ld / p_.size, rows,         panel,
                          depth / kGroup,             piece.columns,        k > 0};
      c.path.real->multiply(tile, c.type, sums_.as<float>());
    }
    widened_ = {&part, piece.block};
  }

  const Problem& p_;
  const Buffer patches_;
  const Buffer weights_;  // one row more, since pieces may be read past the end of a block
  const Buffer sums_;
  Destination destination_;
  size_t part_ = 0;
  Read read_{nullptr, 0, 0};
  Widened widened_{nullptr, 0};
  Matrix matrix_{};
};

void run_panels(const RealConvolution& c) {
  const Problem p(c);
  int64_t cycles = 0;
  for (const Part& part : p.parts) {
    const int64_t rows = std::min(part.panel, part.rows);
    const int64_t vectors = (std::min(kBlock, c.g.out_channels()) + 15) / 16;
    cycles = std::max(cycles, (part.depth + kGroup) * (rows * vectors / 2 + 20) + 200);
  }
  parallel_for(0, p.units, grain_of_cycles(cycles), [&](int64_t begin, int64_t end) {
    Worker worker(p);
    for (int64_t i = begin; i < end; ++i) worker.run(i);
    c.path.release();
  });
}

RealWeight weight_of(const WeightOnlyConvolution& c, const Geometry& g, int64_t bits) {
  const Format format = format_of(c.w_packed, bits);
  int64_t k = 0, words = 0;
  for (const Phase& phase : g.phases) {
    k += phase.taps() * g.in_channels();
    words += words_of(phase.taps() * g.in_channels(), format);
  }
  RealWeight weight =
      real_weight_of({c.w_packed, c.w_scale, c.w_zero_point, std::nullopt, c.compute}, format,
                     g.features, k, words, c.x.scalar_type());
  const int64_t channels = weight.groups > 1 ? k / weight.groups : 1;
  TORCH_CHECK(channels > 0 && g.in_channels() % channels == 0, "groups of ", channels,
              " weights do not divide the ", g.in_channels(), " channels of a group");
  return weight;
}

at::Tensor convolve(const WeightOnlyConvolution& c, const Window& window, int64_t bits) {
  const Geometry g = geometry_of(c.x, c.out_channels, window);
  const RealWeight weight = weight_of(c, g, bits);
  Finish finish(c, weight, g);
  return convolved(c.x, g, finish, nullptr, c.out_dtype, [&] {
    const Path& path = path_for(g.images * g.pixels());
    const bool depthwise = g.groups > 1 && g.in_channels() == 1;
    const Real type = depthwise ? Real::f32 : path.real->type_for(weight.real);
    const CodeKernels& kernels = kernels_for(path, weight.format);
    const RealConvolution convolution{g,      weight, path, kernels,
                                      finish, type,   pixels_of(c.x.to(scalar_type(type)), g)};
    (depthwise ? run_depthwise : run_panels)(convolution);
  });
}

}  // namespace

int64_t words_of(const RealWeight& weight, const Geometry& g, const Phase& phase) {
  return words_of(phase.taps() * g.in_channels(), weight.format);
}

at::Tensor convolution_w4a16(const WeightOnlyConvolution& c, const Window& window) {
  return convolve(c, window, 4);
}

at::Tensor convolution_w8a16(const WeightOnlyConvolution& c, const Window& window) {
  return convolve(c, window, 8);
}

}  // namespace qfuse
