#include "linear/linear_w8a8.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <vector>

#include "isa/select.h"
#include "kernel_api.h"
#include "linear/buffer.h"
#include "linear/grain.h"
#include "linear/operands.h"
#include "parallel.h"
#include "quantized/stored.h"
#include "tensors.h"

namespace qfuse {
namespace {

// From so many rows and blocks on, a copy of rows with flipped bytes takes less time than it saves.
constexpr int64_t kFlippedRows = 12;
constexpr int64_t kFlippedBlocks = 4;

struct Size {
  int64_t rows, n, k;
  int64_t halves;  // 2 with a GLU, else 1
  int64_t groups() const { return (k + kGroup - 1) / kGroup; }
  int64_t columns() const { return n / halves; }  // of the result
  // Each half starts a new block.
  int64_t blocks() const { return (columns() + kBlock - 1) / kBlock; }
};

// The activation as the kernel reads it; signed bytes have a flip.
struct Activation {
  at::Tensor tensor;
  const uint8_t* data;
  int64_t ld;
  uint32_t flip;
};

Size size_of(const Int8Operands& l, const Rows& x, bool halved) {
  const Size size{x.rows, l.w_sums.numel(), x.columns, halved ? 2 : 1};
  const int64_t blocks = size.blocks() * size.halves;
  check_int8(l, size.k);
  TORCH_CHECK(
      l.w_packed.scalar_type() == at::kChar && l.w_packed.is_contiguous() &&
          l.w_packed.sizes() == at::IntArrayRef({blocks, size.groups(), kBlock, kGroup}),
      "w_packed must be contiguous int8 [ceil(N / 64), ceil(K / 4), 64, 4] with N = ", size.n,
      " (elements of w_sums, each half for itself where they are multiplied) and K = ", size.k,
      " (last axis of x), not ", l.w_packed.scalar_type(),
      " ", l.w_packed.sizes());
  TORCH_CHECK(l.w_sums.scalar_type() == at::kInt && l.w_sums.dim() == 1 && l.w_sums.is_contiguous(),
              "w_sums must be contiguous int32 [N]");
  return size;
}

// Copies rows, padded to whole groups of four, where the weights are zero.
Activation padded(const Rows& x, const Size& size) {
  const int64_t ld = size.groups() * kGroup;
  at::Tensor copy = empty_tensor({size.rows, ld}, at::kByte);
  const auto* from = static_cast<const uint8_t*>(x.tensor.const_data_ptr());
  auto* to = copy.mutable_data_ptr<uint8_t>();
  parallel_for(0, size.rows, grain_of_bytes(ld), [&](auto begin, auto end) {
    for (int64_t i = begin; i < end; ++i) {
      std::copy_n(from + i * x.ld, size.k, to + i * ld);
      std::fill(to + i * ld + size.k, to + (i + 1) * ld, uint8_t{0});
    }
  });
  return {copy, to, ld, flip_of(x.tensor)};
}

Activation activation_of(const Rows& x, const Size& size) {
  if (size.k % kGroup != 0) return padded(x, size);
  const auto* data = static_cast<const uint8_t*>(x.tensor.const_data_ptr());
  return {x.tensor, data, x.ld, flip_of(x.tensor)};
}

at::Tensor x_sums_of(const Rows& x, const Size& size, const Path& path) {
  const uint32_t flip = flip_of(x.tensor);
  at::Tensor sums = empty_tensor({size.rows}, at::kInt);
  const auto* from = static_cast<const uint8_t*>(x.tensor.const_data_ptr());
  auto* to = sums.mutable_data_ptr<int32_t>();
  parallel_for(0, size.rows, grain_of_bytes(size.k), [&](auto begin, auto end) {
    sum_rows(from + begin * x.ld, x.ld, end - begin, size.k, flip, shift_of(flip, path),
             to + begin);
  });
  return sums;
}

// Everything that a call needs, with the memory that it points to, except the destination.
struct Problem {
  Size size;
  const Path& path;
  Activation a{};
  const int8_t* w;
  Epilogue epilogue{};
  std::vector<int64_t> shape;  // of the result
  at::ScalarType type;         // after the last epilogue op
  int32_t x_zero = 0;
  std::vector<at::Tensor> kept;

  // Reads and checks all arguments.
  explicit Problem(const Int8Operands& l) : Problem(l, rows_of(l.x)) {}
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  bool empty() const { return size.rows == 0 || size.n == 0; }

  void check_type(at::ScalarType wanted) const {
    TORCH_CHECK(wanted == type, "the epilogue gives ", type, ", not ", wanted);
  }

 private:
  Problem(const Int8Operands& l, const Rows& x)
      : path(path_for(x.rows)), w(l.w_packed.const_data_ptr<int8_t>()), shape(l.x.sizes().vec()) {
    kept.reserve(8 + l.extras.size());
    shape.back() = l.w_sums.numel();
    type = read_steps(l.epilogue, l.extras, shape, l.product_dtype, epilogue, kept,
                      /*takes_halves=*/true);
    size = size_of(l, x, epilogue.half > 0);
    shape.back() = size.columns();
    read_features(l, size.n, epilogue, kept);
    if (l.w_zero_point) epilogue.x_sums = whole(x_sums_of(x, size, path));
    read_rows(l);
    if (!empty()) a = activation_of(x, size);
  }

  // Scales and zero points of the activation.
  void read_rows(const Int8Operands& l) {
    epilogue.scale_per_row = l.x_scale.numel() != 1;
    const int64_t scales = epilogue.scale_per_row ? size.rows : 1;
    epilogue.x_scale = keep_floats(l.x_scale, scales, "x_scale", kept);
    epilogue.zero_per_row = l.x_zero_point && l.x_zero_point->numel() != 1;
    const int32_t least = least_of(l.x.scalar_type());
    const int32_t shift = shift_of(flip_of(l.x), path);
    if (epilogue.zero_per_row) {
      epilogue.x_zero = whole(row_zeros(*l.x_zero_point, size.rows, least, shift));
    } else {
      x_zero = only_zero(l.x_zero_point, least, shift);
      epilogue.x_zero = &x_zero;
    }
  }

  const int32_t* whole(at::Tensor tensor) {
    kept.push_back(std::move(tensor));
    return kept.back().const_data_ptr<int32_t>();
  }
};

// The rows of a unit of work: those of a tile, or as many as the path says, in equal parts of which
// there are enough for all threads.
int64_t strip_rows(const Problem& p, int64_t count) {
  const int64_t tile = p.path.tile_rows(p.size.rows);
  if (!p.path.most_strip_rows) return tile;
  const int64_t fitting = std::max<int64_t>(p.path.most_strip_rows(p.size.k) / tile, 1);
  const int64_t tiles = (count + tile - 1) / tile;
  const int64_t enough = (3 * at::get_num_threads() + p.size.blocks() - 1) / p.size.blocks();
  const int64_t strips = std::min(tiles, std::max((tiles + fitting - 1) / fitting, enough));
  return (tiles + strips - 1) / strips * tile;
}

struct RowBytes {
  const uint8_t* data;
  int64_t ld;
  uint32_t flip;
};

// A strip of rows whose bytes are flipped once, for all blocks that a thread multiplies it with.
class FlippedStrip {
 public:
  FlippedStrip(const Problem& p, int64_t rows)
      : a_(p.a),
        ld_(p.size.groups() * kGroup),
        used_(p.path.flips_slowly && p.a.flip && rows >= kFlippedRows),
        copy_(used_ ? rows * ld_ : 0) {}

  // The rows of a tile, of the strip that begins with `first`: a copy if it is multiplied with at
  // least so many blocks, or was already.
  RowBytes rows(int64_t first, int64_t count, int64_t blocks) {
    if (!used_ || (first != known_ && blocks < kFlippedBlocks)) {
      return {a_.data + first * a_.ld, a_.ld, a_.flip};
    }
    if (first != known_) copy(first, count);
    known_ = first;
    return {copy_.as<uint8_t>(), ld_, 0};
  }

 private:
  void copy(int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      copy_flipped(a_.data + (first + i) * a_.ld, ld_, a_.flip, copy_.as<uint8_t>() + i * ld_);
    }
  }

  const Activation& a_;
  const int64_t ld_;
  const bool used_;
  const Buffer copy_;
  int64_t known_ = -1;
};

// Multiplies and finishes all tiles of `count` rows from `first` on. The order of tiles determines
// which operand stays in the cache; results depend neither on it nor on the threads.
void run(const Problem& p, const Epilogue& epilogue, int64_t first, int64_t count) {
  const Size& size = p.size;
  const int64_t tile_rows = p.path.tile_rows(size.rows);
  const int64_t strip = strip_rows(p, count);
  const int64_t strips = (count + strip - 1) / strip;
  const int64_t blocks = size.blocks();
  const int64_t block_bytes = size.groups() * kGroup * kBlock;
  const bool rows_outer = p.path.most_strip_rows != nullptr;
  const auto tile_of = [&](const RowBytes& a, int64_t block, int64_t row, int64_t rows,
                           int64_t columns) {
    return Tile{a.data + row * a.ld, a.ld, a.flip, rows, p.w + block * block_bytes, size.groups(),
                columns};
  };
  const auto weights_of = [&](int64_t block) {
    return Following(p.w + block * block_bytes, block_bytes);
  };
  const auto work = [&](int64_t begin, int64_t end) {
    const Buffer sums(size.halves * tile_rows * kBlock * sizeof(int32_t));
    int32_t* second = sums.as<int32_t>() + tile_rows * kBlock;
    const bool at_once = p.path.multiply_finished && size.halves == 1;
    FlippedStrip flipped(p, rows_outer ? std::min(strip, count) : 0);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = rows_outer ? i % blocks : i / strips;
      const int64_t row = first + (rows_outer ? i / blocks : i % strips) * strip;
      const int64_t rows = std::min(strip, first + count - row);
      const int64_t column = block * kBlock;
      const int64_t columns = std::min(kBlock, size.columns() - column);
      const int64_t ahead = std::min(end - i, blocks - block) * size.halves;
      const RowBytes a = flipped.rows(row, rows, ahead);
      Following next, next_half;
      if (rows_outer && i + 1 < end) {
        next = weights_of((i + 1) % blocks);
        if (size.halves == 2) next_half = weights_of(blocks + (i + 1) % blocks);
      }
      if (at_once) {
        // Strips of the same block.
        const int64_t together = rows_outer ? 1 : std::min(end, (block + 1) * strips) - i;
        const int64_t all = std::min(together * strip, first + count - row);
        Tile tile = tile_of(a, block, 0, all, columns);
        tile.following = &next;
        if (p.path.multiply_finished(tile, epilogue, row, column)) {
          i += together - 1;
          continue;
        }
      }
      for (int64_t done = 0; done < rows; done += tile_rows) {
        const int64_t some = std::min(tile_rows, rows - done);
        Tile tile = tile_of(a, block, done, some, columns);
        tile.following = &next;
        prefetch_result(epilogue, row + done, some, column, columns);
        p.path.multiply(tile, sums.as<int32_t>());
        if (size.halves == 1) {
          p.path.finish(epilogue, sums.get(), row + done, some, column, columns);
          continue;
        }
        tile.b = p.w + (blocks + block) * block_bytes;
        tile.following = &next_half;
        p.path.multiply(tile, second);
        p.path.finish_halves(epilogue, sums.get(), second, row + done, some, column, columns);
      }
    }
    p.path.release();
  };
  const int64_t cycles =
      block_bytes / 64 * size.halves * std::max<int64_t>(std::min(strip, count), 3) + 200;
  parallel_for(0, strips * blocks, grain_of_cycles(cycles), work);
}

}  // namespace

at::Tensor linear_w8a8(const Int8Operands& l, const Output* output, at::ScalarType out_dtype) {
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

RowResult linear_w8a8_rows(const Int8Operands& l, at::ScalarType float_dtype, const RowOutput& output) {
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
