#include "linear_w8a16.h"

#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

#include "buffer.h"
#include "kernel_api.h"
#include "operands.h"
#include "select.h"

namespace qfuse {
namespace {

// Of K, that a panel holds: 64 or 128 KiB, so that it stays in the second level cache.
constexpr int64_t kDepthGroups = 128;
// Rows that share a panel; widening costs about a seventh of one row's products, or a quarter.
constexpr int64_t kMostRows = 240;
constexpr int64_t kLeastRows = 48;
// A thread gets at least this much to do, in products of 16; about 2 us.
constexpr int64_t kLeastWork = 8000;

struct Problem {
  const Path& path;
  Rows x;     // in `type`, K a multiple of four
  Real type;  // to multiply in
  const int8_t* w;
  int64_t n;
  int64_t groups;
  int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
  const int8_t* block(int64_t i) const { return w + i * groups * kBlock * kGroup; }
};

at::ScalarType scalar_type(Real type) { return type == Real::bf16 ? at::kBFloat16 : at::kFloat; }

// Rows in the type to multiply in, padded to whole groups: weights are zero there, but zero times
// what lies behind a row could be NaN.
Rows operand_of(const at::Tensor& x, Real type, int64_t groups) {
  const int64_t padding = groups * kGroup - x.size(-1);
  const at::Tensor typed = x.to(scalar_type(type));
  return rows_of(padding == 0 ? typed : at::constant_pad_nd(typed, {0, padding}));
}

template <class Element>
void copy_scaled(const Rows& x, float* to, int64_t ld) {
  const auto* from = x.tensor.const_data_ptr<Element>();
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t k = 0; k < x.columns; ++k) {
      to[i * ld + k] = static_cast<float>(from[i * x.ld + k]) * kStreamScale;
    }
    std::fill(to + i * ld + x.columns, to + (i + 1) * ld, 0.0f);
  }
}

Rows stream_operand_of(const at::Tensor& x, int64_t groups) {
  const Rows rows = rows_of(x);
  const int64_t ld = groups * kGroup;
  at::Tensor scaled = at::empty({rows.rows, ld}, at::kFloat);
  auto* to = scaled.mutable_data_ptr<float>();
  if (x.scalar_type() == at::kBFloat16) {
    copy_scaled<at::BFloat16>(rows, to, ld);
  } else if (x.scalar_type() == at::kHalf) {
    copy_scaled<at::Half>(rows, to, ld);
  } else {
    copy_scaled<float>(rows, to, ld);
  }
  return {scaled, rows.rows, ld, ld};
}

int64_t bytes_of(Real type) { return type == Real::bf16 ? 2 : 4; }

const void* row_of(const Problem& p, int64_t row) {
  return static_cast<const char*>(p.x.tensor.const_data_ptr()) + row * p.x.ld * bytes_of(p.type);
}

void stream(const Problem& p, const Epilogue& epilogue) {
  at::parallel_for(0, p.blocks(), kLeastWork / (p.groups * kBlock / kGroup + 1) + 1,
                   [&](int64_t begin, int64_t end) {
                     alignas(64) float sums[kStreamRows * kBlock];
                     for (int64_t i = begin; i < end; ++i) {
                       const int64_t columns = std::min(kBlock, p.n - i * kBlock);
                       p.path.real->stream(static_cast<const float*>(row_of(p, 0)), p.x.ld,
                                           p.x.rows, p.block(i), p.groups, columns, sums);
                       p.path.finish(epilogue, sums, 0, p.x.rows, i * kBlock, columns);
                     }
                   });
}

// Splits rows until there is work for all threads. The order of a sum's terms does not depend on
// it.
int64_t rows_per_strip(int64_t rows, int64_t blocks) {
  int64_t strip = std::min(rows, kMostRows);
  while (strip > kLeastRows && (rows + strip - 1) / strip * blocks < 3 * at::get_num_threads()) {
    strip = (strip + 1) / 2;
  }
  return strip;
}

void multiply_block(const Problem& p, int64_t block, int64_t row, int64_t rows, void* panel,
                    float* sums) {
  const int64_t columns = std::min(kBlock, p.n - block * kBlock);
  const int64_t depth = std::max<int64_t>(p.groups, 1);  // K = 0 still has sums to clear
  for (int64_t g = 0; g < depth; g += kDepthGroups) {
    const int64_t groups = std::min(kDepthGroups, p.groups - g);
    const auto* a = static_cast<const char*>(row_of(p, row)) + g * kGroup * bytes_of(p.type);
    p.path.real->widen(p.block(block) + g * kBlock * kGroup, groups, p.type, panel);
    p.path.real->multiply({a, p.x.ld, rows, panel, groups, columns, g > 0}, p.type, sums);
  }
}

void multiply(const Problem& p, const Epilogue& epilogue) {
  const int64_t strip = rows_per_strip(p.x.rows, p.blocks());
  const int64_t strips = (p.x.rows + strip - 1) / strip;
  const int64_t work = strip * (p.groups + 1) * kGroup * (kBlock / 16);
  at::parallel_for(0, strips * p.blocks(), kLeastWork / work + 1, [&](int64_t begin, int64_t end) {
    const Buffer panel(kDepthGroups * kGroup * kBlock * bytes_of(p.type));
    const Buffer sums(strip * kBlock * sizeof(float));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / strips;
      const int64_t row = i % strips * strip;
      const int64_t rows = std::min(strip, p.x.rows - row);
      multiply_block(p, block, row, rows, panel.get(), sums.as<float>());
      p.path.finish(epilogue, sums.get(), row, rows, block * kBlock,
                    std::min(kBlock, p.n - block * kBlock));
    }
    p.path.release();
  });
}

void check(const at::Tensor& x, const at::Tensor& w_packed, const at::Tensor& w_scale) {
  TORCH_CHECK(x.dim() >= 1, "x must have at least one axis");
  TORCH_CHECK(w_scale.dim() == 1, "w_scale must be [N]");
  const int64_t n = w_scale.numel(), k = x.size(-1);
  TORCH_CHECK(w_packed.scalar_type() == at::kChar && w_packed.is_contiguous() &&
                  w_packed.sizes() == at::IntArrayRef({(n + kBlock - 1) / kBlock,
                                                       (k + kGroup - 1) / kGroup, kBlock, kGroup}),
              "w_packed must be contiguous int8 [ceil(N / 64), ceil(K / 4), 64, 4] with N = ", n,
              " (elements of w_scale) and K = ", k, " (last axis of x), not ",
              w_packed.scalar_type(), " ", w_packed.sizes());
}

}  // namespace

at::Tensor linear_w8a16(const at::Tensor& x, const at::Tensor& w_packed, const at::Tensor& w_scale,
                        const std::optional<at::Tensor>& bias,
                        const std::vector<at::Tensor>& extras, std::string_view steps,
                        at::ScalarType out_dtype) {
  check(x, w_packed, w_scale);
  const Real real = real_of(x.scalar_type(), "x");
  const int64_t n = w_scale.numel();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = n;
  at::Tensor out = at::empty(shape, out_dtype);

  Epilogue epilogue{};
  std::vector<at::Tensor> kept;  // what `epilogue` points into
  const at::ScalarType type = read_steps(steps, extras, shape, x.scalar_type(), epilogue, kept);
  TORCH_CHECK(out_dtype == type, "the epilogue gives ", type, ", not ", out_dtype);
  kept.push_back(vector_of(w_scale, at::kFloat, n, "w_scale"));
  epilogue.w_scale = kept.back().const_data_ptr<float>();
  if (bias) {
    kept.push_back(vector_of(*bias, at::kFloat, n, "bias"));
    epilogue.bias = kept.back().const_data_ptr<float>();
  }
  epilogue.real_sums = true;
  epilogue.real = real;
  epilogue.out_type = static_cast<OutType>(real_of(out_dtype, "out_dtype"));
  epilogue.out = out.mutable_data_ptr();
  epilogue.out_ld = n;
  if (out.numel() == 0) return out;

  const int64_t rows = out.numel() / n;
  const Path& path = path_for(rows);
  const bool streams = rows <= kStreamRows;
  const Real product = streams ? Real::f32 : path.real->type_for(real);
  const int64_t groups = w_packed.size(1);
  const Problem problem{
      path,    streams ? stream_operand_of(x, groups) : operand_of(x, product, groups),
      product, w_packed.const_data_ptr<int8_t>(),
      n,       groups};
  if (streams) {
    stream(problem, epilogue);
  } else {
    multiply(problem, epilogue);
  }
  return out;
}

}  // namespace qfuse
