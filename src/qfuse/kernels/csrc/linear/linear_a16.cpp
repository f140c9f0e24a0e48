#include "linear/linear_a16.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "linear/buffer.h"
#include "kernel_api.h"
#include "digits/digits.h"
#include "linear/grain.h"
#include "linear/operands.h"
#include "linear/real_weight.h"
#include "isa/select.h"
#include "parallel.h"
#include "tensors.h"

namespace qfuse {
namespace {

// K per panel: 64 or 128 KiB, so that it stays in the L2 cache.
constexpr int64_t kDepth = 512;
// The same as kFinishedRows in bfloat16: a multiple of the rows of its tiles.
constexpr int64_t kFinishedRowsBf16 = 96;
// Minimum work per thread, in products of 16; about 2 us.
constexpr int64_t kLeastWork = 8000;

// Powers of two that each row of a stream is divided by; its sums are multiplied by them.
using Factors = std::array<float, kStreamRows>;

struct Problem {
  const Path& path;
  const CodeKernels& kernels;
  const RealWeight& weight;
  Real type;  // to multiply in
  Rows x;     // in `type`, with K padded like the weight's
  Factors factors{};
};

// Rows in the type to multiply in, padded to whole words with zeros, since the weights there are
// undefined.
Rows operand_of(const at::Tensor& x, Real type, int64_t depth) {
  const int64_t padding = depth - x.size(-1);
  const at::Tensor typed = x.to(scalar_type(type));
  return rows_of(padding == 0 ? typed : padded_rows(typed, padding));
}

// Copies rows for a stream, `Ordered` as kStreamOrder says, divided by their factors.
template <bool Ordered, class From, class To>
void copy_rows(const Rows& x, const Factors& factors, To* to, int64_t ld) {
  const auto* from = x.tensor.const_data_ptr<From>();
  for (int64_t i = 0; i < x.rows; ++i, from += x.ld, to += ld) {
    const float inverse = 1.0f / factors[i];
    for (int64_t k = 0; k < x.columns; ++k) {
      to[k] = static_cast<To>(static_cast<float>(from[k]) * inverse);
    }
    std::fill(to + x.columns, to + ld, To(0.0f));
    for (int64_t k = 0; Ordered && k < ld; k += 8) {
      To eight[8];
      for (int64_t j = 0; j < 8; ++j) eight[j] = to[k + kStreamOrder[j]];
      std::copy(eight, eight + 8, to + k);
    }
  }
}

// Only rows with values of at least kStreamLarge are divided; small values would lose bits.
template <class From>
Factors factors_of(const Rows& x) {
  Factors factors{};
  const auto* from = x.tensor.const_data_ptr<From>();
  for (int64_t i = 0; i < x.rows; ++i, from += x.ld) {
    bool large = false;
    for (int64_t k = 0; k < x.columns; ++k) {
      large |= std::abs(static_cast<float>(from[k])) >= kStreamLarge;
    }
    factors[i] = large ? kStreamRaise : 1.0f;
  }
  return factors;
}

// Fills in the rows of a stream; its other fields are set.
template <class From>
void read_stream(Problem& p, const Rows& x) {
  const int64_t ld = p.weight.depth();
  const at::Tensor copy = empty_tensor({x.rows, ld}, scalar_type(p.type));
  p.factors.fill(1.0f);
  if (p.type == Real::bf16) {
    auto* to = copy.mutable_data_ptr<at::BFloat16>();
    (p.weight.format == Format::four ? copy_rows<true, From, at::BFloat16>
                        : copy_rows<false, From, at::BFloat16>)(x, p.factors, to, ld);
  } else {
    if (p.weight.format != Format::four) p.factors = factors_of<From>(x);
    copy_rows<false, From>(x, p.factors, copy.mutable_data_ptr<float>(), ld);
  }
  p.x = {copy, x.rows, ld, ld};
}

void read_stream(Problem& p, const at::Tensor& x) {
  const Rows rows = rows_of(x);
  switch (p.weight.real) {
    case Real::bf16:
      return read_stream<at::BFloat16>(p, rows);
    case Real::f16:
      return read_stream<at::Half>(p, rows);
    default:
      return read_stream<float>(p, rows);
  }
}

const void* row_of(const Problem& p, int64_t row) {
  return static_cast<const char*>(p.x.tensor.const_data_ptr()) + row * p.x.ld * bytes_of(p.type);
}

void multiply_back(const Problem& p, float* sums) {
  for (int64_t i = 0; i < p.x.rows; ++i, sums += kBlock) {
    if (p.factors[i] == 1.0f) continue;
    for (int64_t j = 0; j < kBlock; ++j) sums[j] *= p.factors[i];
  }
}

// Rows that digits do not hold are multiplied as floats, together with the others: how a row is
// summed depends on how many there are, but not on what they hold.
void stream(const Problem& p, const Digits& digits, const Epilogue& epilogue) {
  const RealWeight& w = p.weight;
  parallel_for(0, w.blocks(), kLeastWork / (w.depth() / 4 * kBlock / kGroup + 1) + 1,
               [&](int64_t begin, int64_t end) {
                 alignas(64) float sums[kStreamRows * kBlock];
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t columns = w.columns(i);
                   if (!digits.all()) {
                     p.kernels.stream(w.block(i), row_of(p, 0), p.x.ld, p.x.rows, columns, sums);
                     multiply_back(p, sums);
                   }
                   if (digits.any()) digits.multiply(w.block(i), sums);
                   p.path.finish(epilogue, sums, 0, digits.rows(), i * kBlock, columns);
                 }
               });
}

// The codes of a panel of a block, from k on; none if there is no such block.
Following panel_codes(const RealWeight& w, int64_t block, int64_t k) {
  if (block >= w.blocks()) return {};
  const int64_t words = std::min(kDepth, w.depth() - k) / w.codes_per_word();
  return {w.block(block, k / w.codes_per_word()).codes, words * kBlock * 4};
}

// Writes the result of a strip of rows, of which `row` is the first, and a block. `next` is the block
// after it, or none; `sums` is memory for those of all rows.
void compute_block(const Problem& p, const Epilogue& epilogue, int64_t row, int64_t rows,
                   int64_t block, int64_t next, void* panel, float* sums) {
  const RealWeight& w = p.weight;
  const int64_t columns = w.columns(block);
  const int64_t piece = p.type == Real::f32 ? kFinishedRows : kFinishedRowsBf16;
  const int64_t pieces = parts_of(rows, piece);
  const int64_t most = std::max<int64_t>(w.depth(), 1);  // with K = 0, sums still have to be cleared
  for (int64_t k = 0; k < most; k += kDepth) {
    const bool last = k + kDepth >= most;
    const int64_t depth = std::min(kDepth, w.depth() - k);
    p.kernels.widen(w.block(block), k, depth, p.type, panel);
    Following following = last ? panel_codes(w, next, 0) : panel_codes(w, block, k + kDepth);
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t first = i * piece;
      const int64_t count = std::min(piece, rows - first);
      const auto* a = static_cast<const char*>(row_of(p, row + first)) + k * bytes_of(p.type);
      float* of_piece = sums + first * kBlock;
      if (last) prefetch_result(epilogue, row + first, count, block * kBlock, columns);
      p.path.real->multiply({a, p.x.ld, count, panel, depth / kGroup, columns, k > 0, &following},
                            p.type, of_piece);
      if (!last) continue;
      p.path.finish(epilogue, of_piece, row + first, count, block * kBlock, columns);
    }
  }
}

// Pairs of a block and a strip of rows are numbered by block, and each thread has a range of them. It
// takes one strip after the other, with all of its blocks: 256 rows of bfloat16 stay in an L2 cache
// of 2 MiB up to K of about 3000, of float32 up to half of that. With longer rows, reading the codes
// for every strip still takes less than reading all rows for every block.
void multiply(const Problem& p, const Epilogue& epilogue) {
  const RealWeight& w = p.weight;
  const int64_t strip = rows_per_strip(p.x.rows, w.blocks());
  const int64_t strips = parts_of(p.x.rows, strip);
  const int64_t work = strip * (w.depth() + kGroup) * (kBlock / 16);
  parallel_for(0, strips * w.blocks(), kLeastWork / work + 1, [&](int64_t begin, int64_t end) {
    const Buffer panel(kDepth * kBlock * bytes_of(p.type));
    const Buffer sums(strip * kBlock * sizeof(float));
    const auto first_block = [&](int64_t s) {
      return parts_of(std::max<int64_t>(begin - s, 0), strips);
    };
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t row = s * strip;
      const int64_t rows = std::min(strip, p.x.rows - row);
      const int64_t blocks = parts_of(std::max<int64_t>(end - s, 0), strips);
      for (int64_t block = first_block(s); block < blocks; ++block) {
        int64_t next = block + 1;
        if (next == blocks) next = s + 1 < strips ? first_block(s + 1) : w.blocks();
        compute_block(p, epilogue, row, rows, block, next, panel.get(), sums.as<float>());
      }
    }
    p.path.release();
  });
}

RealWeight weight_of(const WeightOnlyLinear& l, int64_t bits) {
  TORCH_CHECK(l.x.dim() >= 1, "x must have at least one axis");
  const int64_t k = l.x.size(-1);
  const Format format = format_of(l.w_packed, bits);
  return real_weight_of({l.w_packed, l.w_scale, l.w_zero_point, l.w_offset, l.compute}, format,
                        l.out_features, k, words_of(k, format), l.x.scalar_type());
}

at::Tensor linear(const WeightOnlyLinear& l, int64_t bits) {
  const RealWeight weight = weight_of(l, bits);
  const int64_t n = weight.n;
  std::vector<int64_t> shape = l.x.sizes().vec();
  shape.back() = n;
  at::Tensor out = empty_tensor(shape, l.out_dtype);

  Epilogue epilogue{};
  std::vector<at::Tensor> kept;  // owns the memory that `epilogue` points to
  const at::ScalarType type =
      read_steps(l.steps, l.extras, shape, l.x.scalar_type(), epilogue, kept);
  TORCH_CHECK(l.out_dtype == type, "the epilogue gives ", type, ", not ", l.out_dtype);
  if (weight.whole) epilogue.w_scale = weight.scale.const_data_ptr<float>();
  if (l.bias) {
    kept.push_back(vector_of(*l.bias, at::kFloat, n, "bias"));
    epilogue.bias = kept.back().const_data_ptr<float>();
  }
  epilogue.real_sums = true;
  epilogue.real = weight.real;
  epilogue.out_type = static_cast<Element>(real_of(l.out_dtype, "out_dtype"));
  epilogue.out = out.mutable_data_ptr();
  epilogue.out_ld = n;
  if (out.numel() == 0) return out;

  const int64_t rows = out.numel() / n;
  const Path& path = path_for(rows);
  const CodeKernels& kernels = kernels_for(path, weight.format);
  if (rows <= kStreamRows) {
    const Real product = kernels.stream_type(weight.real, rows);
    const Digits digits(path, weight, rows_of(l.x));
    Problem problem{path, kernels, weight, product, {}};
    if (!digits.all()) read_stream(problem, l.x);
    stream(problem, digits, epilogue);
  } else {
    const Real product = path.real->type_for(weight.real);
    multiply({path, kernels, weight, product, operand_of(l.x, product, weight.depth())}, epilogue);
  }
  return out;
}

}  // namespace

at::Tensor linear_w4a16(const WeightOnlyLinear& l) { return linear(l, 4); }

at::Tensor linear_w8a16(const WeightOnlyLinear& l) { return linear(l, 8); }

at::Tensor linear_w16a32(const WeightOnlyLinear& l) { return linear(l, 16); }

}  // namespace qfuse
