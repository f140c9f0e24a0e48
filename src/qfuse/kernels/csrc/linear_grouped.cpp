#include "linear_grouped.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>

#include "buffer.h"
#include "group_operands.h"
#include "kernel_api.h"
#include "operands.h"
#include "select.h"
#include "stored.h"

namespace qfuse {
namespace {

// A thread gets at least this much to do (about 2 us); starting a team costs about as much.
constexpr int64_t kLeastCycles = 8000;
// Of K, that a panel of bytes holds: 32 KiB, so that it stays in a near cache.
constexpr int64_t kPanelDepth = 128;
// Rows that share a panel.
constexpr int64_t kMostRows = 240;
constexpr int64_t kLeastRows = 48;

using Multiply = void (*)(const GroupTile& tile, float* totals);

struct Problem {
  const Path& path;
  const GroupedSize& size;
  const GroupedInput& input;
  WeightBits bits;
  const uint8_t* w;
  Groups groups;  // of the first block and row

  int64_t columns(int64_t block) const { return std::min(kBlock, size.n - block * kBlock); }
  const uint8_t* block(int64_t i) const { return w + i * size.block_bytes; }

  Groups groups_of(int64_t block, int64_t row) const {
    const auto moved = [](auto* from, int64_t by) { return from ? from + by : nullptr; };
    const int64_t first = block * size.groups * kBlock;
    return {groups.count,
            groups.scale + first,
            groups.w_sums + first,
            moved(groups.w_zero, first),
            moved(groups.x_zero, row),
            moved(groups.x_terms, row * size.groups)};
  }
};

void clear(float* totals, int64_t rows) { std::memset(totals, 0, rows * kBlock * sizeof(float)); }

// Tiles whose totals a kernel makes from the weights as they are packed.
void run_direct(const Problem& p, Multiply multiply, const Epilogue& epilogue) {
  const GroupedSize& size = p.size;
  const int64_t tile_rows = p.path.tile_rows(size.rows);
  const int64_t strips = (size.rows + tile_rows - 1) / tile_rows;
  const auto work = [&](int64_t begin, int64_t end) {
    const Buffer totals(tile_rows * kBlock * sizeof(float));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / strips;
      const int64_t row = i % strips * tile_rows;
      const int64_t rows = std::min(tile_rows, size.rows - row);
      const int64_t columns = p.columns(block);
      clear(totals.as<float>(), rows);
      multiply({p.input.row(row), p.input.ld, rows, p.block(block), size.depth,
                p.groups_of(block, row)},
               totals.as<float>());
      p.path.finish(epilogue, totals.get(), row, rows, block * kBlock, columns);
    }
    p.path.release();
  };
  const int64_t cycles = size.groups * (size.depth + 2) *
                             std::max<int64_t>(std::min(tile_rows, size.rows), 3) * 4 + 200;
  at::parallel_for(0, strips * size.blocks, kLeastCycles / cycles + 1, work);
}

struct Scratch {
  const Buffer panel;
  const Buffer sums;
  const Buffer totals;
};

// The totals of a strip, some groups at a time: their codes become bytes once for all its rows.
void multiply_strip(const Problem& p, int64_t block, int64_t first, int64_t rows,
                    int64_t tile_rows, const Scratch& scratch) {
  const GroupedSize& size = p.size;
  const bool packed = p.bits == WeightBits::four;
  const int64_t slice = std::max<int64_t>(1, kPanelDepth / std::max<int64_t>(size.depth, 1));
  const int64_t group_bytes = size.depth * kGroup * kBlock;
  clear(scratch.totals.as<float>(), rows);
  for (int64_t g = 0; g < size.groups; g += slice) {
    const int64_t end = std::min(size.groups, g + slice);
    const uint8_t* b = p.block(block) + g * group_bytes / (packed ? 2 : 1);
    if (packed) {
      p.path.groups->unpack(b, (end - g) * size.depth / 2, scratch.panel.as<uint8_t>());
      b = scratch.panel.as<uint8_t>();
    }
    for (int64_t i = 0; i < rows; i += tile_rows) {
      const int64_t count = std::min(tile_rows, rows - i);
      const Groups groups = p.groups_of(block, first + i);
      for (int64_t at = g; at < end; ++at) {
        p.path.multiply({p.input.row(first + i) + at * size.depth * kGroup, p.input.ld, 0, count,
                         reinterpret_cast<const int8_t*>(b) + (at - g) * group_bytes, size.depth,
                         p.columns(block)},
                        scratch.sums.as<int32_t>());
        p.path.groups->add(groups, at, scratch.sums.as<int32_t>(), count,
                           scratch.totals.as<float>() + i * kBlock);
      }
    }
  }
}

// Splits rows until there is work for all threads; no value depends on it.
int64_t rows_per_strip(const GroupedSize& size) {
  int64_t strip = std::min(size.rows, kMostRows);
  const int64_t enough = 3 * at::get_num_threads();
  while (strip > kLeastRows && (size.rows + strip - 1) / strip * size.blocks < enough) {
    strip = (strip + 1) / 2;
  }
  return strip;
}

void run_panels(const Problem& p, const Epilogue& epilogue) {
  const GroupedSize& size = p.size;
  const int64_t strip = rows_per_strip(size);
  const int64_t strips = (size.rows + strip - 1) / strip;
  const int64_t tile_rows = std::min(strip, p.path.tile_rows(size.rows));
  const int64_t depth = std::max(kPanelDepth, size.depth);
  const auto work = [&](int64_t begin, int64_t end) {
    const Scratch scratch{Buffer(depth * kGroup * kBlock),
                          Buffer(tile_rows * kBlock * sizeof(int32_t)),
                          Buffer(strip * kBlock * sizeof(float))};
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / strips;
      const int64_t row = i % strips * strip;
      const int64_t rows = std::min(strip, size.rows - row);
      multiply_strip(p, block, row, rows, tile_rows, scratch);
      p.path.finish(epilogue, scratch.totals.get(), row, rows, block * kBlock, p.columns(block));
    }
    p.path.release();
  };
  const int64_t cycles = size.groups * (size.depth + 4) * (strip + 4) * 4 + 200;
  at::parallel_for(0, strips * size.blocks, kLeastCycles / cycles + 1, work);
}

Groups groups_of(const GroupedLinear& l, const GroupedSize& size, const GroupedInput& input) {
  const auto numbers = [](const at::Tensor& t) {
    return t.defined() ? t.const_data_ptr<int32_t>() : nullptr;
  };
  const bool zeros = l.w_zero_point && l.w_zero_point->numel() != 1;
  return {size.groups,
          l.w_scale.const_data_ptr<float>(),
          l.w_sums.const_data_ptr<int32_t>(),
          zeros ? l.w_zero_point->const_data_ptr<int8_t>() : nullptr,
          numbers(input.zeros),
          numbers(input.terms)};
}

void run(const GroupedLinear& l, WeightBits bits, const Rows& x, const GroupedSize& size,
         const Epilogue& epilogue) {
  const Path& path = path_for(size.rows);
  const bool four = bits == WeightBits::four;
  const Multiply direct = four ? path.groups->codes : path.groups->bytes;
  const GroupedInput input = grouped_input(l, x, size, direct && four);
  const Problem problem{path, size, input, bits,
                        static_cast<const uint8_t*>(l.w_packed.const_data_ptr()),
                        groups_of(l, size, input)};
  if (direct) {
    run_direct(problem, direct, epilogue);
  } else {
    run_panels(problem, epilogue);
  }
}

}  // namespace

at::Tensor linear_grouped(const GroupedLinear& l, WeightBits bits, const Output* output,
                          at::ScalarType out_dtype) {
  const Rows x = rows_of(l.x);
  const GroupedSize size = grouped_size(l, bits, x);
  std::vector<int64_t> shape = l.x.sizes().vec();
  shape.back() = size.n;
  at::Tensor out = at::empty(shape, out_dtype);

  Epilogue epilogue{};
  std::vector<at::Tensor> kept;  // what `epilogue` points into
  const at::ScalarType type = read_steps(l.epilogue, l.extras, shape, l.real, epilogue, kept);
  if (output) {
    epilogue.quantizer = quantizer_of(*output, out_dtype);
  } else {
    TORCH_CHECK(out_dtype == type, "the epilogue gives ", type, ", not ", out_dtype);
  }
  const auto real = [&](const at::Tensor& t, int64_t count, const char* what) {
    kept.push_back(vector_of(t, at::kFloat, count, what));
    return kept.back().const_data_ptr<float>();
  };
  epilogue.real_sums = true;
  epilogue.real = real_of(l.real, "real");
  epilogue.scale_per_row = l.x_scale.numel() != 1;
  epilogue.x_scale = real(l.x_scale, epilogue.scale_per_row ? size.rows : 1, "x_scale");
  if (l.bias) epilogue.bias = real(*l.bias, size.n, "bias");
  epilogue.out_type = out_type_of(out_dtype);
  epilogue.out = out.mutable_data_ptr();
  epilogue.out_ld = size.n;
  if (out.numel() > 0) run(l, bits, x, size, epilogue);
  return out;
}

}  // namespace qfuse
