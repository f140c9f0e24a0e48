#include "matmul/matmul_a8a8.h"

#include <c10/core/ScalarType.h>

#include <algorithm>

#include "isa/select.h"
#include "kernel_api.h"
#include "linear/buffer.h"
#include "linear/grain.h"
#include "linear/int8_operands.h"
#include "linear/operands.h"
#include "matmul/batches.h"
#include "matmul/deep_sums.h"
#include "matmul/extras.h"
#include "matmul/pack_right.h"
#include "parallel.h"
#include "quantized/stored.h"
#include "tensors.h"

namespace qfuse {
namespace {

// Rows that are finished at once: several tiles, whose sums stay in the L1 cache.
constexpr int64_t kPanelRows = 24;
// What makes signed bytes of unsigned ones, and the zero point that this adds.
constexpr uint8_t kSigned = 0x80;
constexpr int32_t kMiddle = 128;

struct Size {
  int64_t m, n, k;
  bool deep;  // whether sums may overflow int32
  int64_t groups() const { return (k + kGroup - 1) / kGroup; }
  int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
  int64_t block_bytes() const { return groups() * kGroup * kBlock; }
};

void check_stored(const at::Tensor& values, const char* what) {
  TORCH_CHECK(values.scalar_type() == at::kChar || values.scalar_type() == at::kByte, what,
              " must be int8 or uint8, not ", values.scalar_type());
  TORCH_CHECK(values.dim() >= 2, what, " must have at least two axes, not ", values.dim());
}

Size size_of(const Matmul& matmul) {
  const at::Tensor& x = matmul.x.values;
  const at::Tensor& other = matmul.other.values;
  check_stored(x, "x");
  check_stored(other, "other");
  const int64_t k = x.size(-1);
  TORCH_CHECK(other.size(-2) == k, "x has ", k, " columns and other has ", other.size(-2), " rows");
  const bool has_zero = matmul.other.zero_point || other.scalar_type() == at::kByte;
  return {x.size(-2), other.size(-1), k, k > max_depth(has_zero)};
}

// Parameters of an operand, one for each element of `shape`.
at::Tensor spread(const at::Tensor& given, at::IntArrayRef shape, const char* what) {
  TORCH_CHECK(broadcasts_to(given.sizes(), shape), what, " of shape ", given.sizes(),
              " does not broadcast to ", shape);
  return given.expand(shape).contiguous();
}

// The right operand, and what each of its columns has. Vectors have one row of N for all entries or
// one for each.
struct Right {
  const uint8_t* data;
  int64_t k_stride, n_stride;
  uint8_t flip;                  // what makes signed bytes
  std::vector<int64_t> offsets;  // of its own entries
  std::vector<int64_t> entry;    // for each batch entry of the result
  at::Tensor scale;              // of `scale_step` elements each; 0 if all entries share one
  at::Tensor zero;               // of the bytes as packed, with `zero_step`
  bool has_zero = false;         // whether one of them is not 0
  int64_t scale_step = 0;
  int64_t zero_step = 0;
  std::vector<uint8_t> ones;
  // Whether all entries are packed before they are multiplied. Otherwise each thread packs the
  // entry that it multiplies, which then is in its cache.
  bool before = false;
  at::Tensor packed;  // [entries][blocks][groups][64][4]
  at::Tensor sums;    // [entries][N]
};

// Reads scales and zero points of columns.
void read_columns(const StoredOperand& other, const Size& size, Right& right) {
  const std::vector<int64_t> columns = shape_of(batch_of(other.values), 1, size.n);
  const bool shares_scale = other.scale.numel() == 1;
  const at::Tensor scale = shares_scale ? other.scale : spread(other.scale, columns, "other_scale");
  right.scale = vector_of(scale, at::kFloat, shares_scale ? size.n : scale.numel(), "other_scale");
  right.scale_step = shares_scale ? 0 : size.n;
  const int32_t least = least_of(other.values.scalar_type());
  if (!other.zero_point || other.zero_point->numel() == 1) {
    right.zero = empty_tensor({size.n}, at::kInt);
    std::fill_n(right.zero.mutable_data_ptr<int32_t>(), size.n,
                only_zero(other.zero_point, least, 0, "other_zero_point"));
  } else {
    const at::Tensor given = spread(*other.zero_point, columns, "other_zero_point");
    right.zero = row_zeros(given, given.numel(), least, 0, "other_zero_point");
    right.zero_step = size.n;
  }
  auto* zero = right.zero.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < right.zero.numel(); ++i) {
    zero[i] -= kMiddle;
    right.has_zero = right.has_zero || zero[i] != 0;
  }
}

// Where the entries of an operand are.
void read_entries(const at::Tensor& values, at::IntArrayRef batch, const Size& size, Right& right) {
  const std::vector<int64_t> own = batch_of(values);
  const auto lead = values.dim() - 2;
  right.data = static_cast<const uint8_t*>(values.const_data_ptr());
  right.k_stride = values.stride(-2);
  right.n_stride = values.stride(-1);
  right.flip = values.scalar_type() == at::kByte ? kSigned : 0;
  right.offsets = offsets_of(own, own, values.strides().slice(0, lead));
  right.entry = offsets_of(batch, own, contiguous_strides(own));
  right.ones.assign(size.groups() * kGroup, 1);
  const bool enough = static_cast<int64_t>(right.entry.size()) >= at::get_num_threads();
  // Entries in another order would be packed again and again.
  right.before = !enough || !std::is_sorted(right.entry.begin(), right.entry.end());
}

// Packs a block of an entry, and sums its columns: a product with a row of ones.
void pack(const Right& right, const Size& size, const Path& path, int64_t entry, int64_t block,
          int8_t* to, int32_t* sums, int32_t* totals) {
  const int64_t column = block * kBlock;
  const int64_t columns = std::min(kBlock, size.n - column);
  pack_block({right.data + right.offsets[entry], size.k, right.k_stride, right.n_stride}, column,
             columns, right.flip, to);
  if (size.deep) return;
  const int64_t depth = size.groups() * kGroup;
  path.multiply({right.ones.data(), depth, 0, 1, to, size.groups(), columns}, totals);
  const int32_t* zero = right.zero.const_data_ptr<int32_t>() + entry * right.zero_step + column;
  for (int64_t c = 0; c < columns; ++c) {
    sums[column + c] = totals[c] - static_cast<int32_t>(zero[c] * size.k);
  }
}

// For a matmul with one row, which need not set up AMX.
const Path& path_of_sums() { return path_for(1); }

void pack_all(const Size& size, Right& right) {
  const auto entries = static_cast<int64_t>(right.offsets.size());
  const int64_t blocks = size.blocks();
  right.packed = empty_tensor({entries * blocks * size.block_bytes()}, at::kChar);
  right.sums = empty_tensor({entries, size.n}, at::kInt);
  auto* packed = right.packed.mutable_data_ptr<int8_t>();
  auto* sums = right.sums.mutable_data_ptr<int32_t>();
  const Path& path = path_of_sums();
  const auto work = [&](int64_t begin, int64_t end) {
    const Buffer totals(kBlock * sizeof(int32_t));
    for (int64_t i = begin; i < end; ++i) {
      pack(right, size, path, i / blocks, i % blocks, packed + i * size.block_bytes(),
           sums + i / blocks * size.n, totals.as<int32_t>());
    }
    path.release();
  };
  parallel_for(0, entries * blocks, grain_of_bytes(size.block_bytes()), work);
}

// Everything that a call needs, with the memory that it points to, except the destination.
struct Problem {
  Size size;
  std::vector<int64_t> batch;
  std::vector<int64_t> shape;  // of the result
  const Path& path;
  at::Tensor x;  // with adjacent elements in its rows
  int64_t ld;
  uint32_t flip;
  std::vector<int64_t> x_offsets;
  Right right;
  Epilogue epilogue{};  // with the parameters of the first row of the first entry
  std::vector<BatchedExtra> extras;
  at::ScalarType type;  // after the last epilogue op
  int32_t x_zero = 0;
  int64_t panel;  // rows
  int64_t panels;
  std::vector<at::Tensor> kept;

  explicit Problem(const Matmul& matmul) : Problem(matmul, size_of(matmul)) {}
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  // Whether rows are copied, padded to whole groups of four.
  bool copies() const { return size.k % kGroup != 0; }

 private:
  Problem(const Matmul& matmul, const Size& given)
      : size(given),
        batch(broadcast_batch(matmul.x.values.sizes(), matmul.other.values.sizes())),
        shape(shape_of(batch, size.m, size.n)),
        path(path_for(size.m)),
        flip(flip_of(matmul.x.values)) {
    kept.reserve(4 + matmul.extras.size());
    type = parse_steps(matmul.epilogue, matmul.extras, matmul.product_dtype, epilogue);
    for (const at::Tensor& extra : matmul.extras) extras.push_back(batched_extra(extra, shape, kept));
    set_product(epilogue, matmul.product_dtype);
    epilogue.real_sums = size.deep;
    read_x(matmul.x);
    read_columns(matmul.other, size, right);
    const int64_t tile = path.tile_rows(size.m);
    panel = (kPanelRows + tile - 1) / tile * tile;
    panels = (size.m + panel - 1) / panel;
    read_entries(matmul.other.values, batch, size, right);
    if (right.before && !right.entry.empty() && size.m > 0 && size.n > 0) pack_all(size, right);
  }

  void read_x(const StoredOperand& operand) {
    x = operand.values;
    if (size.k > 1 && x.stride(-1) != 1) x = x.contiguous();
    ld = size.m > 1 ? x.stride(-2) : size.k;
    const auto lead = x.dim() - 2;
    x_offsets = offsets_of(batch, x.sizes().slice(0, lead), x.strides().slice(0, lead));
    const std::vector<int64_t> rows = shape_of(batch, size.m, 1);
    epilogue.scale_per_row = operand.scale.numel() != 1;
    const at::Tensor scale =
        epilogue.scale_per_row ? spread(operand.scale, rows, "x_scale") : operand.scale;
    epilogue.x_scale = keep_floats(scale, scale.numel(), "x_scale", kept);
    const int32_t least = least_of(x.scalar_type());
    const int32_t shift = shift_of(flip, path);
    epilogue.zero_per_row = operand.zero_point && operand.zero_point->numel() != 1;
    if (epilogue.zero_per_row) {
      const at::Tensor given = spread(*operand.zero_point, rows, "x_zero_point");
      kept.push_back(row_zeros(given, given.numel(), least, shift));
      epilogue.x_zero = kept.back().const_data_ptr<int32_t>();
    } else {
      x_zero = only_zero(operand.zero_point, least, shift);
      epilogue.x_zero = &x_zero;
    }
  }
};

// Computes panels of rows of one entry, with all columns. Results depend neither on their order nor
// on the threads.
class Worker {
 public:
  explicit Worker(const Problem& p)
      : p_(p),
        rows_(std::min(p.panel, p.size.m)),
        panel_(p.copies() ? rows_ * p.size.groups() * kGroup : 0),
        sums_(rows_ * kBlock * sizeof(int32_t)),
        x_sums_(rows_ * sizeof(int32_t)),
        packed_(p.right.before ? 0 : p.size.blocks() * p.size.block_bytes()),
        packed_sums_(p.right.before ? 0 : p.size.n * sizeof(int32_t)),
        totals_(kBlock * sizeof(int32_t)),
        sums_path_(path_of_sums()),
        deep_(p.path, sums_path_, p.right.ones.data(), p.size.deep ? rows_ : 0),
        epilogue_(p.epilogue) {}

  void run(int64_t unit) {
    const int64_t entry = unit / p_.panels;
    const int64_t first = unit % p_.panels * p_.panel;
    const int64_t rows = std::min(p_.panel, p_.size.m - first);
    const Tile all = read(p_.x_offsets[entry] + first * p_.ld, rows);
    const int8_t* packed = packed_entry(p_.right.entry[entry]);
    move(entry, first);
    const Size& size = p_.size;
    const int64_t tile = p_.path.tile_rows(size.m);
    for (int64_t block = 0; block < size.blocks(); ++block) {
      const int64_t columns = std::min(kBlock, size.n - block * kBlock);
      Tile part = all;
      part.rows = rows;
      part.b = packed + block * size.block_bytes();
      part.groups = size.groups();
      part.columns = columns;
      if (size.deep) {
        const ZeroPoints zero{zero_, p_.epilogue.zero_per_row, w_zero_ + block * kBlock};
        deep_.totals(part, tile, size.k, zero, sums_.get());
      } else if (p_.path.multiply_finished &&
                 p_.path.multiply_finished(part, epilogue_, 0, block * kBlock)) {
        continue;
      }
      for (int64_t i = 0; !size.deep && i < rows; i += tile) {
        part.a = all.a + i * all.lda;
        part.rows = std::min(tile, rows - i);
        p_.path.multiply(part, sums_.as<int32_t>() + i * kBlock);
      }
      p_.path.finish(epilogue_, sums_.get(), 0, rows, block * kBlock, columns);
    }
  }

  void release() const {
    p_.path.release();
    if (&sums_path_ != &p_.path) sums_path_.release();
  }

 private:
  // Lets the epilogue read the sums of an entry of the right operand, and returns its blocks.
  const int8_t* packed_entry(int64_t entry) {
    const Size& size = p_.size;
    const Right& right = p_.right;
    if (right.before) {
      epilogue_.w_sums = right.sums.const_data_ptr<int32_t>() + entry * size.n;
      return right.packed.const_data_ptr<int8_t>() + entry * size.blocks() * size.block_bytes();
    }
    auto* packed = packed_.as<int8_t>();
    auto* sums = packed_sums_.as<int32_t>();
    epilogue_.w_sums = sums;
    for (int64_t block = 0; entry != known_ && block < size.blocks(); ++block) {
      pack(right, size, sums_path_, entry, block, packed + block * size.block_bytes(), sums,
           totals_.as<int32_t>());
    }
    known_ = entry;
    return packed;
  }

  // The rows as the kernels read them, and their sums if columns have zero points.
  Tile read(int64_t offset, int64_t rows) const {
    Tile tile{};
    tile.a = static_cast<const uint8_t*>(p_.x.const_data_ptr()) + offset;
    tile.lda = p_.ld;
    tile.flip = p_.flip;
    if (p_.right.has_zero && !p_.size.deep) {
      sum_rows(tile.a, tile.lda, rows, p_.size.k, tile.flip, shift_of(tile.flip, p_.path),
               x_sums_.as<int32_t>());
    }
    if (!p_.copies()) return tile;
    const int64_t ld = p_.size.groups() * kGroup;
    auto* to = panel_.as<uint8_t>();
    for (int64_t i = 0; i < rows; ++i, to += ld) {
      std::copy_n(tile.a + i * tile.lda, p_.size.k, to);
      std::fill(to + p_.size.k, to + ld, uint8_t{0});
    }
    tile.a = panel_.as<uint8_t>();
    tile.lda = ld;
    return tile;
  }

  // Lets the epilogue begin with row `first` of an entry.
  void move(int64_t entry, int64_t first) {
    const Epilogue& from = p_.epilogue;
    const Right& right = p_.right;
    const int64_t row = entry * p_.size.m + first;
    const int64_t own = right.entry[entry];
    if (from.scale_per_row) epilogue_.x_scale = from.x_scale + row;
    zero_ = from.zero_per_row ? from.x_zero + row : from.x_zero;
    w_zero_ = right.zero.const_data_ptr<int32_t>() + own * right.zero_step;
    epilogue_.w_scale = right.scale.const_data_ptr<float>() + own * right.scale_step;
    // Float sums have no zero points.
    epilogue_.x_zero = p_.size.deep ? nullptr : zero_;
    if (right.has_zero && !p_.size.deep) {
      epilogue_.x_sums = x_sums_.as<int32_t>();
      epilogue_.w_zero = w_zero_;
    }
    epilogue_.out = static_cast<char*>(from.out) + row * p_.size.n * bytes_of(from.out_type);
    for (size_t i = 0; i < p_.extras.size(); ++i) {
      const auto& [rows, offsets] = p_.extras[i];
      const int64_t at = (offsets[entry] + first * rows.ld) * bytes_of(rows.type);
      epilogue_.extra[i] = {static_cast<const char*>(rows.data) + at, rows.ld, rows.type};
    }
  }

  const Problem& p_;
  const int64_t rows_;
  const Buffer panel_;
  const Buffer sums_;
  const Buffer x_sums_;
  const Buffer packed_;  // the entry `known_` of the right operand
  const Buffer packed_sums_;
  const Buffer totals_;
  const Path& sums_path_;
  DeepSums deep_;
  int64_t known_ = -1;
  const int32_t* zero_ = nullptr;    // of the rows
  const int32_t* w_zero_ = nullptr;  // of the columns
  Epilogue epilogue_;
};

}  // namespace

at::Tensor matmul_a8a8(const Matmul& matmul, const Output* output, at::ScalarType out_dtype) {
  Problem p(matmul);
  if (output) {
    p.epilogue.quantizer = quantizer_of(*output, out_dtype);
    fold_clamps(p.epilogue);
  } else {
    TORCH_CHECK(out_dtype == p.type, "the epilogue gives ", p.type, ", not ", out_dtype);
  }
  at::Tensor out = empty_tensor(p.shape, out_dtype);
  if (out.numel() == 0) return out;
  p.epilogue.out_type = element_of(out_dtype, "out_dtype");
  p.epilogue.out = out.mutable_data_ptr();
  p.epilogue.out_ld = p.size.n;
  const int64_t rows = std::max<int64_t>(std::min(p.panel, p.size.m), 3);
  const int64_t cycles = p.size.blocks() * (p.size.groups() * kGroup * rows + 200);
  const auto units = static_cast<int64_t>(p.right.entry.size()) * p.panels;
  parallel_for(0, units, grain_of_cycles(cycles), [&](int64_t begin, int64_t end) {
    Worker worker(p);
    for (int64_t i = begin; i < end; ++i) worker.run(i);
    worker.release();
  });
  return out;
}

}  // namespace qfuse
