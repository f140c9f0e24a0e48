#include "linear/linear_a16.h"

#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "linear/buffer.h"
#include "kernel_api.h"
#include "linear/operands.h"
#include "isa/select.h"

namespace qfuse {
namespace {

// K per panel: 64 or 128 KiB, so that it stays in the L2 cache.
constexpr int64_t kDepth = 512;
// Rows that share a panel; dequantizing costs about a seventh or a quarter of one row's products.
constexpr int64_t kMostRows = 240;
constexpr int64_t kLeastRows = 48;
// Minimum work per thread, in products of 16; about 2 us.
constexpr int64_t kLeastWork = 8000;
constexpr int64_t kGroupMultiple = 8;

// The packed weight and its parameters, padded to all features of the last block.
struct Weight {
  int64_t bits;
  int64_t n;
  int64_t k;
  int64_t depth;  // k, padded to whole words
  int64_t groups;
  bool whole;  // one group without offsets: the epilogue scales
  Real compute;
  Real real;
  at::Tensor codes;
  at::Tensor scale;
  at::Tensor zero;    // undefined if absent
  at::Tensor offset;  // undefined if absent

  int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
  int64_t columns(int64_t i) const { return std::min(kBlock, n - i * kBlock); }
  RealBlock block(int64_t i) const {
    const int64_t first = i * groups * kBlock;
    const auto at = [&]<class Element>(const at::Tensor& values, const Element*) {
      return values.defined() ? static_cast<const Element*>(values.const_data_ptr()) + first
                              : nullptr;
    };
    const auto* bytes = static_cast<const uint8_t*>(codes.const_data_ptr());
    return {bytes + i * depth * bits / 8 * kBlock,
            depth,
            depth / groups,
            whole ? nullptr : at(scale, static_cast<const float*>(nullptr)),
            at(zero, static_cast<const int8_t*>(nullptr)),
            at(offset, static_cast<const float*>(nullptr)),
            compute,
            real};
  }
};

// Powers of two that each row of a stream is divided by; its sums are multiplied by them.
using Factors = std::array<float, kStreamRows>;

struct Problem {
  const Path& path;
  const CodeKernels& kernels;
  const Weight& weight;
  Real type;  // to multiply in
  Rows x;     // in `type`, with K padded like the weight's
  Factors factors{};
};

at::ScalarType scalar_type(Real type) { return type == Real::bf16 ? at::kBFloat16 : at::kFloat; }

// Rows in the type to multiply in, padded to whole words with zeros, since the weights there are
// undefined.
Rows operand_of(const at::Tensor& x, Real type, int64_t depth) {
  const int64_t padding = depth - x.size(-1);
  const at::Tensor typed = x.to(scalar_type(type));
  return rows_of(padding == 0 ? typed : at::constant_pad_nd(typed, {0, padding}));
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
  const int64_t ld = p.weight.depth;
  const at::Tensor copy = at::empty({x.rows, ld}, scalar_type(p.type));
  p.factors.fill(1.0f);
  if (p.type == Real::bf16) {
    auto* to = copy.mutable_data_ptr<at::BFloat16>();
    (p.weight.bits == 4 ? copy_rows<true, From, at::BFloat16>
                        : copy_rows<false, From, at::BFloat16>)(x, p.factors, to, ld);
  } else {
    if (p.weight.bits == 8) p.factors = factors_of<From>(x);
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

int64_t bytes_of(Real type) { return type == Real::bf16 ? 2 : 4; }

const void* row_of(const Problem& p, int64_t row) {
  return static_cast<const char*>(p.x.tensor.const_data_ptr()) + row * p.x.ld * bytes_of(p.type);
}

void multiply_back(const Problem& p, float* sums) {
  for (int64_t i = 0; i < p.x.rows; ++i, sums += kBlock) {
    if (p.factors[i] == 1.0f) continue;
    for (int64_t j = 0; j < kBlock; ++j) sums[j] *= p.factors[i];
  }
}

void stream(const Problem& p, const Epilogue& epilogue) {
  const Weight& w = p.weight;
  at::parallel_for(0, w.blocks(), kLeastWork / (w.depth / 4 * kBlock / kGroup + 1) + 1,
                   [&](int64_t begin, int64_t end) {
                     alignas(64) float sums[kStreamRows * kBlock];
                     for (int64_t i = begin; i < end; ++i) {
                       const int64_t columns = w.columns(i);
                       p.kernels.stream(w.block(i), row_of(p, 0), p.x.ld, p.x.rows, columns, sums);
                       multiply_back(p, sums);
                       p.path.finish(epilogue, sums, 0, p.x.rows, i * kBlock, columns);
                     }
                   });
}

// Splits rows until there is work for all threads. The summation order does not depend on it.
int64_t rows_per_strip(int64_t rows, int64_t blocks) {
  int64_t strip = std::min(rows, kMostRows);
  while (strip > kLeastRows && (rows + strip - 1) / strip * blocks < 3 * at::get_num_threads()) {
    strip = (strip + 1) / 2;
  }
  return strip;
}

void multiply_block(const Problem& p, int64_t block, int64_t row, int64_t rows, void* panel,
                    float* sums) {
  const Weight& w = p.weight;
  const int64_t most = std::max<int64_t>(w.depth, 1);  // with K = 0, sums still have to be cleared
  for (int64_t k = 0; k < most; k += kDepth) {
    const int64_t depth = std::min(kDepth, w.depth - k);
    const auto* a = static_cast<const char*>(row_of(p, row)) + k * bytes_of(p.type);
    p.kernels.widen(w.block(block), k, depth, p.type, panel);
    const RealTile tile{a, p.x.ld, rows, panel, depth / kGroup, w.columns(block), k > 0};
    p.path.real->multiply(tile, p.type, sums);
  }
}

void multiply(const Problem& p, const Epilogue& epilogue) {
  const Weight& w = p.weight;
  const int64_t strip = rows_per_strip(p.x.rows, w.blocks());
  const int64_t strips = (p.x.rows + strip - 1) / strip;
  const int64_t work = strip * (w.depth + kGroup) * (kBlock / 16);
  at::parallel_for(0, strips * w.blocks(), kLeastWork / work + 1, [&](int64_t begin, int64_t end) {
    const Buffer panel(kDepth * kBlock * bytes_of(p.type));
    const Buffer sums(strip * kBlock * sizeof(float));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / strips;
      const int64_t row = i % strips * strip;
      const int64_t rows = std::min(strip, p.x.rows - row);
      multiply_block(p, block, row, rows, panel.get(), sums.as<float>());
      p.path.finish(epilogue, sums.get(), row, rows, block * kBlock, w.columns(block));
    }
    p.path.release();
  });
}

// Parameters as [blocks, groups, 64]; those of a single group may have shape [N].
at::Tensor parameters_of(const at::Tensor& given, at::ScalarType type, const Weight& w,
                         const char* what) {
  const std::vector<int64_t> shape{w.blocks(), w.groups, kBlock};
  const bool wants_float = at::isFloatingType(type);
  TORCH_CHECK(wants_float ? at::isFloatingType(given.scalar_type()) : given.scalar_type() == type,
              what, " has type ", given.scalar_type(), ", expected ",
              wants_float ? "a float type" : toString(type));
  if (given.dim() == 1 && w.groups == 1) {
    TORCH_CHECK(given.numel() == w.n, what, " has ", given.numel(), " elements, expected ", w.n);
    const int64_t padding = w.blocks() * kBlock - w.n;
    const at::Tensor typed = given.to(type);
    return (padding == 0 ? typed : at::constant_pad_nd(typed, {0, padding})).contiguous();
  }
  TORCH_CHECK(given.sizes() == at::IntArrayRef(shape), what, " must be ", at::IntArrayRef(shape),
              ", or with one group [", w.n, "], not ", given.sizes());
  return given.to(type).contiguous();
}

void check_groups(const Weight& w) {
  if (w.groups == 1 && w.whole) return;
  TORCH_CHECK(w.groups >= 1 && w.k % w.groups == 0 && w.k / w.groups % kGroupMultiple == 0,
              "groups, and weights with offsets, must be of a multiple of ", kGroupMultiple,
              " input features; here ", w.groups, " groups share ", w.k);
}

Weight weight_of(const WeightOnlyLinear& l, int64_t bits) {
  TORCH_CHECK(l.x.dim() >= 1, "x must have at least one axis");
  TORCH_CHECK(l.out_features >= 0, "out_features is ", l.out_features);
  const int64_t codes = 32 / bits, k = l.x.size(-1), words = (k + codes - 1) / codes;
  const int64_t groups = l.w_scale.dim() == 3 ? l.w_scale.size(1) : 1;
  Weight w{bits,
           l.out_features,
           k,
           words * codes,
           groups,
           groups == 1 && !l.w_offset,
           real_of(l.compute, "compute"),
           real_of(l.x.scalar_type(), "x"),
           l.w_packed,
           {},
           {},
           {}};
  const at::ScalarType stored = bits == 4 ? at::kByte : at::kChar;
  TORCH_CHECK(l.w_packed.scalar_type() == stored && l.w_packed.is_contiguous() &&
                  l.w_packed.sizes() == at::IntArrayRef({w.blocks(), words, kBlock, kGroup}),
              "w_packed must be contiguous ", toString(stored), " [ceil(N / 64), ceil(K / ", codes,
              "), 64, 4] with N = ", w.n, " and K = ", k, " (last axis of x), not ",
              l.w_packed.scalar_type(), " ", l.w_packed.sizes());
  check_groups(w);
  w.scale = parameters_of(l.w_scale, at::kFloat, w, "w_scale");
  if (l.w_zero_point) w.zero = parameters_of(*l.w_zero_point, stored, w, "w_zero_point");
  if (l.w_offset) w.offset = parameters_of(*l.w_offset, at::kFloat, w, "w_offset");
  return w;
}

at::Tensor linear(const WeightOnlyLinear& l, int64_t bits) {
  const Weight weight = weight_of(l, bits);
  const int64_t n = weight.n;
  std::vector<int64_t> shape = l.x.sizes().vec();
  shape.back() = n;
  at::Tensor out = at::empty(shape, l.out_dtype);

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
  const CodeKernels& kernels = bits == 4 ? path.real->four : path.real->eight;
  if (rows <= kStreamRows) {
    const Real product = kernels.stream_type(weight.real, rows);
    Problem problem{path, kernels, weight, product, {}};
    read_stream(problem, l.x);
    stream(problem, epilogue);
  } else {
    const Real product = path.real->type_for(weight.real);
    multiply({path, kernels, weight, product, operand_of(l.x, product, weight.depth)}, epilogue);
  }
  return out;
}

}  // namespace

at::Tensor linear_w4a16(const WeightOnlyLinear& l) { return linear(l, 4); }

at::Tensor linear_w8a16(const WeightOnlyLinear& l) { return linear(l, 8); }

}  // namespace qfuse
