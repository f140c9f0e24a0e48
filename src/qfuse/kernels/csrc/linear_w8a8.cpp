#include "linear_w8a8.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "buffer.h"
#include "kernel_api.h"
#include "operands.h"
#include "select.h"
#include "stored.h"

namespace qfuse {
namespace {

// Sums are exact in int32 while their final value fits: |x - x_zero| <= 255 and |w| <= 128 give
// 255 * 128 * 2^16 < 2^31, and with a weight zero point 255 * 255 * 2^15 < 2^31.
constexpr int64_t kMaxDepth = int64_t{1} << 16;
constexpr int64_t kMaxDepthWithWeightZero = int64_t{1} << 15;

// A thread gets at least this much to do (about 2 us); starting a team costs about as much.
constexpr int64_t kLeastCycles = 8000;
constexpr int64_t kLeastBytes = 32768;

struct Size {
  int64_t rows, n, k;
  int64_t groups() const { return (k + kGroup - 1) / kGroup; }
  int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
};

// The activation as the kernel reads it: bytes of signed numbers are flipped to unsigned.
struct Activation {
  at::Tensor tensor;
  const uint8_t* data;
  int64_t ld;
  uint32_t flip;
};

uint32_t flip_of(const at::Tensor& x) { return x.scalar_type() == at::kChar ? 0x80808080u : 0u; }

Size size_of(const Linear& l, const Rows& x) {
  const Size size{x.rows, l.w_sums.numel(), x.columns};
  TORCH_CHECK(l.x.scalar_type() == at::kChar || l.x.scalar_type() == at::kByte,
              "x must be int8 or uint8, not ", l.x.scalar_type());
  TORCH_CHECK(
      l.w_packed.scalar_type() == at::kChar && l.w_packed.is_contiguous() &&
          l.w_packed.sizes() == at::IntArrayRef({size.blocks(), size.groups(), kBlock, kGroup}),
      "w_packed must be contiguous int8 [ceil(N / 64), ceil(K / 4), 64, 4] with N = ", size.n,
      " (elements of w_sums) and K = ", size.k, " (last axis of x), not ", l.w_packed.scalar_type(),
      " ", l.w_packed.sizes());
  TORCH_CHECK(l.w_sums.scalar_type() == at::kInt && l.w_sums.dim() == 1 && l.w_sums.is_contiguous(),
              "w_sums must be contiguous int32 [N]");
  const int64_t most = l.w_zero_point ? kMaxDepthWithWeightZero : kMaxDepth;
  TORCH_CHECK(size.k <= most, "K is ", size.k, "; int32 sums are exact up to ", most);
  return size;
}

// Copies rows to where every group of four exists, padded with zeros: the weights are zero there.
Activation dense(const Rows& x, uint32_t flip, const Size& size) {
  const int64_t ld = size.groups() * kGroup;
  at::Tensor copy = at::empty({size.rows, ld}, at::kByte);
  const auto* from = static_cast<const uint8_t*>(x.tensor.const_data_ptr());
  auto* to = copy.mutable_data_ptr<uint8_t>();
  const auto byte = static_cast<uint8_t>(flip);
  at::parallel_for(0, size.rows, kLeastBytes / std::max<int64_t>(ld, 1) + 1,
                   [&](auto begin, auto end) {
                     for (int64_t i = begin; i < end; ++i) {
                       for (int64_t k = 0; k < size.k; ++k)
                         to[i * ld + k] = from[i * x.ld + k] ^ byte;
                       std::memset(to + i * ld + size.k, 0, ld - size.k);
                     }
                   });
  return {copy, to, ld, 0};
}

Activation activation_of(const Rows& x, const Size& size, const Path& path) {
  const uint32_t flip = flip_of(x.tensor);
  const bool usable = size.k % kGroup == 0 && (!path.dense || (flip == 0 && x.ld >= size.k));
  if (!usable) return dense(x, flip, size);
  return {x.tensor, static_cast<const uint8_t*>(x.tensor.const_data_ptr()), x.ld, flip};
}

at::Tensor x_sums_of(const Rows& x, const Size& size) {
  at::Tensor sums = at::empty({size.rows}, at::kInt);
  const auto* from = static_cast<const uint8_t*>(x.tensor.const_data_ptr());
  const auto byte = static_cast<uint8_t>(flip_of(x.tensor));
  auto* to = sums.mutable_data_ptr<int32_t>();
  at::parallel_for(0, size.rows, kLeastBytes / std::max<int64_t>(size.k, 1) + 1,
                   [&](auto begin, auto end) {
                     for (int64_t i = begin; i < end; ++i) {
                       int32_t sum = 0;
                       for (int64_t k = 0; k < size.k; ++k)
                         sum += static_cast<uint8_t>(from[i * x.ld + k] ^ byte);
                       to[i] = sum;
                     }
                   });
  return sums;
}

// Multiplies and finishes all tiles. The order of tiles decides which operand stays in the cache;
// no value depends on it, nor on the threads.
void run(const Path& path, const Size& size, const Activation& a, const int8_t* w,
         const Epilogue& epilogue) {
  const int64_t tile_rows = path.tile_rows(size.rows);
  const int64_t strips = (size.rows + tile_rows - 1) / tile_rows;
  const int64_t blocks = size.blocks();
  const int64_t block_bytes = size.groups() * kGroup * kBlock;
  // Few rows: each block of weights is read once, by one thread. Tall tiles: A stays, weights pass.
  const bool rows_outer = path.dense && strips > 1;
  const auto work = [&](int64_t begin, int64_t end) {
    const Buffer sums(tile_rows * kBlock * sizeof(int32_t));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t strip = rows_outer ? i / blocks : i % strips;
      const int64_t block = rows_outer ? i % blocks : i / strips;
      const int64_t row = strip * tile_rows;
      const int64_t rows = std::min(tile_rows, size.rows - row);
      const int64_t columns = std::min(kBlock, size.n - block * kBlock);
      path.multiply({a.data + row * a.ld, a.ld, a.flip, rows, w + block * block_bytes,
                     size.groups(), columns},
                    sums.as<int32_t>());
      path.finish(epilogue, sums.get(), row, rows, block * kBlock, columns);
    }
    path.release();
  };
  const int64_t cycles =
      block_bytes / 64 * std::max<int64_t>(std::min(tile_rows, size.rows), 3) + 200;
  at::parallel_for(0, strips * blocks, kLeastCycles / cycles + 1, work);
}

}  // namespace

at::Tensor linear_w8a8(const Linear& l, const Output* output, at::ScalarType out_dtype) {
  const Rows x = rows_of(l.x);
  const Size size = size_of(l, x);
  std::vector<int64_t> shape = l.x.sizes().vec();
  shape.back() = size.n;
  at::Tensor out = at::empty(shape, out_dtype);

  Epilogue epilogue{};
  std::vector<at::Tensor> kept;  // what `epilogue` points into
  kept.reserve(8 + l.extras.size());
  const at::ScalarType type = read_steps(l.epilogue, l.extras, shape, l.real, epilogue, kept);
  if (output) {
    epilogue.quantizer = quantizer_of(*output, out_dtype);
  } else {
    TORCH_CHECK(out_dtype == type, "the epilogue gives ", type, ", not ", out_dtype);
  }
  const auto hold = [&](at::Tensor tensor) {
    kept.push_back(std::move(tensor));
    return kept.back().const_data_ptr();
  };
  const auto real = [&](const at::Tensor& t, int64_t count, const char* what) {
    return static_cast<const float*>(hold(vector_of(t, at::kFloat, count, what)));
  };
  epilogue.real = real_of(l.real, "real");
  epilogue.scale_per_row = l.x_scale.numel() != 1;
  epilogue.x_scale = real(l.x_scale, epilogue.scale_per_row ? size.rows : 1, "x_scale");
  epilogue.zero_per_row = l.x_zero_point && l.x_zero_point->numel() != 1;
  const int32_t least = least_of(l.x.scalar_type());
  const int32_t zero = epilogue.zero_per_row ? 0 : only_zero(l.x_zero_point, least);
  epilogue.x_zero =
      epilogue.zero_per_row
          ? static_cast<const int32_t*>(hold(row_zeros(*l.x_zero_point, size.rows, least)))
          : &zero;
  epilogue.w_scale = real(l.w_scale, size.n, "w_scale");
  epilogue.w_sums = l.w_sums.const_data_ptr<int32_t>();
  if (l.bias) epilogue.bias = real(*l.bias, size.n, "bias");
  if (l.w_zero_point) {
    epilogue.w_zero = static_cast<const int32_t*>(
        hold(vector_of(*l.w_zero_point, at::kInt, size.n, "w_zero_point")));
    epilogue.x_sums = static_cast<const int32_t*>(hold(x_sums_of(x, size)));
  }
  epilogue.out_type = out_type_of(out_dtype);
  epilogue.out = out.mutable_data_ptr();
  epilogue.out_ld = size.n;

  if (out.numel() == 0) return out;
  const Path& path = path_for(size.rows);
  run(path, size, activation_of(x, size, path), l.w_packed.const_data_ptr<int8_t>(), epilogue);
  return out;
}

}  // namespace qfuse
