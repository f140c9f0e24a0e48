#include "linear/linear_grouped.h"

#include <c10/core/ScalarType.h>

#include <algorithm>

#include "linear/buffer.h"
#include "linear/grain.h"
#include "linear/group_operands.h"
#include "kernel_api.h"
#include "linear/operands.h"
#include "isa/select.h"
#include "parallel.h"
#include "quantized/stored.h"
#include "tensors.h"

namespace qfuse {
namespace {

// K per panel of bytes: 32 KiB, so that it stays in a near cache.
constexpr int64_t kPanelDepth = 128;

using Multiply = void (*)(const GroupTile& tile, float* totals);

Multiply direct_kernel(const Path& path, bool packed, int64_t rows) {
  const GroupKernels& kernels = *path.groups;
  if (!packed) return rows <= kernels.byte_rows ? kernels.bytes : nullptr;
  return rows <= kernels.code_rows ? kernels.codes : nullptr;
}

// Everything that a call needs, with the memory that it points to, except the destination.
struct Problem {
  GroupedSize size{};
  const Path& path;
  bool packed;      // two values per byte
  Multiply direct;  // computes totals from packed weights; null if there is none
  bool is_signed;   // the rows
  GroupedInput input{};
  const uint8_t* w;
  Groups groups{};  // of the first block and row
  Epilogue epilogue{};
  std::vector<int64_t> shape;  // of the result
  at::ScalarType type;         // after the last epilogue op
  std::vector<at::Tensor> kept;

  // Reads and checks all arguments.
  explicit Problem(const GroupedLinear& l) : Problem(l, rows_of(l.x)) {}
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  bool empty() const { return size.rows == 0 || size.n == 0; }

  void check_type(at::ScalarType wanted) const {
    TORCH_CHECK(wanted == type, "the epilogue gives ", type, ", not ", wanted);
  }

  int64_t columns(int64_t block) const { return std::min(kBlock, size.columns() - block * kBlock); }
  const uint8_t* block(int64_t i) const { return w + i * size.block_bytes; }

  Groups groups_of(int64_t block, int64_t row) const {
    const auto moved = [](auto* from, int64_t by) { return from ? from + by : nullptr; };
    const int64_t first = block * size.groups * kBlock;
    return {groups.count,
            groups.scale + first,
            moved(groups.short_sums, first),
            moved(groups.long_sums, first),
            moved(groups.w_zero, first),
            moved(groups.x_zero, row),
            moved(groups.x_terms, row * size.groups)};
  }

 private:
  Problem(const GroupedLinear& l, const Rows& x)
      : path(path_for(x.rows)),
        packed(l.bits == WeightBits::four),
        direct(direct_kernel(path, packed, x.rows)),
        is_signed(path.keeps_sign ? (packed && direct) || l.x.scalar_type() == at::kChar
                                  : packed && (direct || path.groups->panel)),
        w(static_cast<const uint8_t*>(l.w_packed.const_data_ptr())),
        shape(l.x.sizes().vec()) {
    TORCH_CHECK(l.features >= 0, "out_features cannot be ", l.features);
    shape.back() = l.features;
    type = read_steps(l.epilogue, l.extras, shape, l.product_dtype, epilogue, kept,
                      /*takes_halves=*/true);
    size = grouped_size(l, x, epilogue.half > 0);
    shape.back() = size.columns();
    epilogue.real_sums = true;
    set_product(epilogue, l.product_dtype);
    epilogue.scale_per_row = l.x_scale.numel() != 1;
    epilogue.x_scale = floats(l.x_scale, epilogue.scale_per_row ? size.rows : 1, "x_scale");
    if (l.bias) epilogue.bias = floats(*l.bias, size.n, "bias");
    if (empty()) return;
    input = grouped_input(l, x, size, is_signed);
    const auto numbers = [](const at::Tensor& t) {
      return t.defined() ? t.const_data_ptr<int32_t>() : nullptr;
    };
    const bool zeros = l.w_zero_point && l.w_zero_point->numel() != 1;
    const bool are_short = l.w_sums.scalar_type() == at::kShort;
    groups = {size.groups,
              l.w_scale.const_data_ptr<float>(),
              are_short ? l.w_sums.const_data_ptr<int16_t>() : nullptr,
              are_short ? nullptr : l.w_sums.const_data_ptr<int32_t>(),
              zeros ? l.w_zero_point->const_data_ptr<int8_t>() : nullptr,
              numbers(input.zeros),
              numbers(input.terms)};
  }

  const float* floats(const at::Tensor& tensor, int64_t count, const char* what) {
    kept.push_back(vector_of(tensor, at::kFloat, count, what));
    return kept.back().const_data_ptr<float>();
  }
};

// The totals of some rows of a block, and with a GLU of the matching block of the other half.
class Totals {
 public:
  Totals(const Problem& p, int64_t rows)
      : halves_(p.size.halves), count_(rows * kBlock), buffer_(halves_ * count_ * sizeof(float)) {}

  // Makes all of them zero.
  void clear() const { std::fill_n(of_half(0), halves_ * count_, 0.0f); }

  float* of_half(int64_t half) const { return buffer_.as<float>() + half * count_; }

  // Writes the results of `rows` rows from `row` on, whose totals begin with those of row `at`.
  void finish(const Problem& p, const Epilogue& epilogue, int64_t block, int64_t row, int64_t rows,
              int64_t at) const {
    const float* totals = of_half(0) + at * kBlock;
    const int64_t columns = p.columns(block);
    if (halves_ == 1) {
      p.path.finish(epilogue, totals, row, rows, block * kBlock, columns);
    } else {
      p.path.finish_halves(epilogue, totals, totals + count_, row, rows, block * kBlock, columns);
    }
  }

 private:
  const int64_t halves_;
  const int64_t count_;
  const Buffer buffer_;
};

void run_direct(const Problem& p, const Epilogue& epilogue, int64_t first, int64_t count) {
  const GroupedSize& size = p.size;
  const int64_t tile_rows = std::min(p.path.tile_rows(size.rows), count);
  const int64_t strips = parts_of(count, tile_rows);
  const auto work = [&](int64_t begin, int64_t end) {
    const Totals totals(p, tile_rows);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / strips;
      const int64_t row = first + i % strips * tile_rows;
      const int64_t rows = std::min(tile_rows, first + count - row);
      totals.clear();
      for (int64_t half = 0; half < size.halves; ++half) {
        const int64_t of_half = half * size.blocks + block;
        p.direct({p.input.row(row), p.input.ld, rows, p.block(of_half), size.depth,
                  p.groups_of(of_half, row), p.is_signed},
                 totals.of_half(half));
      }
      totals.finish(p, epilogue, block, row, rows, 0);
    }
    p.path.release();
  };
  const int64_t vectors = size.halves * size.groups * (size.depth + 2) * 4;
  const int64_t cycles = vectors * std::max<int64_t>(tile_rows, 3) + 200;
  parallel_for(0, strips * size.blocks, grain_of_cycles(cycles), work);
}

// What a thread needs for strips of rows.
struct Scratch {
  Scratch(const Problem& p, int64_t rows)
      : tile_rows(p.path.tile_rows(p.size.rows)),
        panel(std::max(kPanelDepth, p.size.depth) * kGroup * kBlock),
        sums(std::min(tile_rows, rows) * kBlock * sizeof(int32_t)),
        totals(p, rows) {}

  const int64_t tile_rows;
  const Buffer panel;  // of unpacked weights
  const Buffer sums;   // of a tile and a group
  const Totals totals;
};

// Groups of a block of weights, as bytes, and what is read after them.
struct Slice {
  int64_t block;
  int64_t first;  // group
  int64_t last;
  const uint8_t* bytes;
  Following following{};
};

// Adds the groups of a slice to the totals of some rows.
void multiply_slice(const Problem& p, Slice& slice, int64_t row, int64_t rows,
                    const Scratch& scratch, float* totals) {
  const int64_t depth = p.size.depth;
  if (p.path.groups->panel) {
    const GroupTile tile{p.input.row(row), p.input.ld, rows, slice.bytes, depth,
                         p.groups_of(slice.block, row), p.is_signed, &slice.following};
    return p.path.groups->panel(tile, slice.first, slice.last, totals);
  }
  auto* sums = scratch.sums.as<int32_t>();
  for (int64_t i = 0; i < rows; i += scratch.tile_rows) {
    const int64_t count = std::min(scratch.tile_rows, rows - i);
    const Groups groups = p.groups_of(slice.block, row + i);
    const auto* codes = reinterpret_cast<const int8_t*>(slice.bytes);
    for (int64_t at = slice.first; at < slice.last; ++at, codes += depth * kGroup * kBlock) {
      p.path.multiply({p.input.row(row + i) + at * depth * kGroup, p.input.ld, 0, count, codes,
                       depth, kBlock},
                      sums);
      p.path.groups->add(groups, at, sums, count, totals + i * kBlock);
    }
  }
}

// Writes the result of a strip of rows and a block, and of the other half of a GLU: some groups at a
// time, which are unpacked once for all rows. `next` are the weights that are read after it, or null.
void run_strip(const Problem& p, const Epilogue& epilogue, int64_t block, int64_t first,
               int64_t rows, const uint8_t* next, const Scratch& scratch) {
  const GroupedSize& size = p.size;
  const int64_t groups = std::max<int64_t>(1, kPanelDepth / std::max<int64_t>(size.depth, 1));
  const int64_t piece = parts_of(kFinishedRows, scratch.tile_rows) * scratch.tile_rows;
  const auto stored_bytes = [&](int64_t count) {
    return count * size.depth * kGroup * kBlock / (p.packed ? 2 : 1);
  };
  scratch.totals.clear();
  for (int64_t half = 0; half < size.halves; ++half) {
    const int64_t of_half = half * size.blocks + block;
    const bool last_half = half + 1 == size.halves;
    for (int64_t g = 0; g < size.groups; g += groups) {
      const int64_t end = std::min(size.groups, g + groups);
      const bool last = end == size.groups;
      const uint8_t* b = p.block(of_half) + stored_bytes(g);
      const uint8_t* behind = !last       ? b + stored_bytes(end - g)
                              : last_half ? next
                                          : p.block(of_half + size.blocks);
      const int64_t more = std::min(groups, last ? size.groups : size.groups - end);
      if (p.packed) {
        p.path.groups->unpack(b, (end - g) * size.depth / 2, scratch.panel.as<uint8_t>());
        b = scratch.panel.as<uint8_t>();
      }
      Slice slice{of_half, g, end, b};
      if (behind) slice.following = Following(behind, stored_bytes(more));
      const bool finished = last && last_half;
      for (int64_t i = 0; i < rows; i += piece) {
        const int64_t row = first + i;
        const int64_t count = std::min(piece, rows - i);
        if (finished) prefetch_result(epilogue, row, count, block * kBlock, p.columns(block));
        float* totals = scratch.totals.of_half(half) + i * kBlock;
        multiply_slice(p, slice, row, count, scratch, totals);
        if (finished) scratch.totals.finish(p, epilogue, block, row, count, i);
      }
    }
  }
}

void run_panels(const Problem& p, const Epilogue& epilogue, int64_t first, int64_t count) {
  const GroupedSize& size = p.size;
  const int64_t strip = rows_per_strip(count, size.blocks);
  const int64_t strips = parts_of(count, strip);
  const auto work = [&](int64_t begin, int64_t end) {
    const Scratch scratch(p, strip);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = first + i % strips * strip;
      const int64_t rows = std::min(strip, first + count - row);
      const uint8_t* next = i + 1 < end ? p.block((i + 1) / strips) : nullptr;
      run_strip(p, epilogue, i / strips, row, rows, next, scratch);
    }
    p.path.release();
  };
  const int64_t cycles = size.halves * size.groups * (size.depth + 4) * (strip + 4) * 4 + 200;
  parallel_for(0, strips * size.blocks, grain_of_cycles(cycles), work);
}

// Computes `count` rows from `first` on.
void run(const Problem& p, const Epilogue& epilogue, int64_t first, int64_t count) {
  if (p.direct) return run_direct(p, epilogue, first, count);
  run_panels(p, epilogue, first, count);
}

}  // namespace

at::Tensor linear_grouped(const GroupedLinear& l, const Output* output, at::ScalarType out_dtype) {
  Problem p(l);
  if (output) {
    p.epilogue.quantizer = quantizer_of(*output, out_dtype);
    fold_clamps(p.epilogue);
  } else {
    p.check_type(out_dtype);
  }
  at::Tensor out = empty_tensor(p.shape, out_dtype);
  p.epilogue.out_type = element_of(out_dtype, "out_dtype");
  p.epilogue.out = out.mutable_data_ptr();
  p.epilogue.out_ld = p.size.columns();
  if (out.numel() > 0) run(p, p.epilogue, 0, p.size.rows);
  return out;
}

RowResult linear_grouped_rows(const GroupedLinear& l, at::ScalarType float_dtype,
                              const RowOutput& output) {
  const Problem p(l);
  p.check_type(float_dtype);
  const auto rows = [&](int64_t first, int64_t count, float* to, int64_t ld) {
    Epilogue epilogue = p.epilogue;
    epilogue.out_type = Element::f32;
    epilogue.out = to;
    epilogue.out_ld = ld;
    epilogue.out_row = first;
    run(p, epilogue, first, count);
  };
  return quantize_rows(p.shape, p.type, output, p.path.tile_rows(p.size.rows), rows);
}

}  // namespace qfuse
