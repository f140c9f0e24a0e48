#include "convolution/destination.h"

#include <algorithm>

#include "linear/operands.h"
#include "quantized/stored.h"

namespace qfuse {
namespace {

const void* moved(const void* from, int64_t bytes) {
  return static_cast<const char*>(from) + bytes;
}

}  // namespace

Finish::Finish(const Int8Operands& o, const Geometry& g, bool grouped) {
  kept.reserve(4 + o.extras.size());
  type = parse_steps(o.epilogue, o.extras, o.product_dtype, epilogue);
  for (const at::Tensor& extra : o.extras) extras.push_back(extra_of(extra, g, kept));
  if (grouped) {
    epilogue.real_sums = true;
    set_product(epilogue, o.product_dtype);
    if (o.bias) epilogue.bias = keep_floats(*o.bias, g.features, "bias", kept);
  } else {
    read_features(o, g.features, epilogue, kept);
  }
  TORCH_CHECK(o.x_scale.numel() == 1, "x_scale has ", o.x_scale.numel(), " elements, expected 1");
  epilogue.x_scale = keep_floats(o.x_scale, 1, "x_scale", kept);
  x_zero = only_zero(o.x_zero_point, least_of(o.x.scalar_type()));
  multiplied_zero = x_zero;
  if (!grouped) epilogue.x_zero = &multiplied_zero;
}

Finish::Finish(const WeightOnlyConvolution& c, const RealWeight& weight, const Geometry& g) {
  kept.reserve(2 + c.extras.size());
  type = parse_steps(c.steps, c.extras, c.x.scalar_type(), epilogue);
  for (const at::Tensor& extra : c.extras) extras.push_back(extra_of(extra, g, kept));
  epilogue.real_sums = true;
  epilogue.real = weight.real;
  if (weight.whole) {
    kept.push_back(weight.scale);
    epilogue.w_scale = weight.scale.const_data_ptr<float>();
  }
  if (c.bias) epilogue.bias = keep_floats(*c.bias, g.features, "bias", kept);
}

Destination::Destination(const Finish& finish, const Geometry& g)
    : finish_(finish), g_(g), epilogue_(finish.epilogue) {}

void Destination::move(const Phase& phase, int64_t pixel) {
  const auto& [z, y, x] = phase.line;
  const int64_t pixels = phase.pixels();
  const int64_t image = pixel / pixels;
  const int64_t rest = pixel % pixels;
  const bool whole = pixels == g_.pixels();  // all output pixels, one after the other
  const int64_t line = whole ? pixels : x.pixels;
  const int64_t at = rest / line;
  phase_ = &phase;
  first_ = pixel - rest % line;
  end_ = first_ + line;
  int64_t out = 0;
  if (!whole) {
    const int64_t out_z = z.out_first + at / y.pixels * z.out_step;
    const int64_t out_y = y.out_first + at % y.pixels * y.out_step;
    out = (out_z * g_.out[1] + out_y) * g_.out[2] + x.out_first;
  }
  const int64_t step = whole ? 1 : x.out_step;
  const Epilogue& from = finish_.epilogue;
  const int64_t row = image * g_.pixels() + out;
  epilogue_.out = static_cast<char*>(from.out) + row * g_.features * bytes_of(from.out_type);
  epilogue_.out_ld = g_.features * step;
  for (size_t i = 0; i < finish_.extras.size(); ++i) {
    const auto& [rows, distance] = finish_.extras[i];
    const int64_t offset = image * distance + out * rows.ld;
    epilogue_.extra[i] = {moved(rows.data, offset * bytes_of(rows.type)), rows.ld * step, rows.type};
  }
}

template <class Run>
void Destination::each_run(const Phase& phase, int64_t first, int64_t count, const Run& run) {
  for (int64_t i = 0; i < count;) {
    const int64_t pixel = first + i;
    if (phase_ != &phase || pixel < first_ || pixel >= end_) move(phase, pixel);
    const int64_t rows = std::min(count - i, end_ - pixel);
    run(i, pixel - first_, rows);
    i += rows;
  }
}

void Destination::write(const Path& path, const Phase& phase, int64_t first, int64_t count,
                        int64_t column, int64_t columns, const void* sums,
                        const int32_t* w_sums, const int32_t* x_sums) {
  epilogue_.w_sums = w_sums;
  each_run(phase, first, count, [&](int64_t i, int64_t row, int64_t rows) {
    if (x_sums) epilogue_.x_sums = x_sums + i - row;
    const auto* from = static_cast<const int32_t*>(sums) + i * kBlock;
    path.finish(epilogue_, from, row, rows, column, columns);
  });
}

bool Destination::multiply(const Path& path, const Phase& phase, int64_t first, const Tile& tile,
                           int64_t column, const int32_t* w_sums) {
  if (!path.multiply_finished) return false;
  epilogue_.w_sums = w_sums;
  bool done = true;
  each_run(phase, first, tile.rows, [&](int64_t i, int64_t row, int64_t rows) {
    Tile part = tile;
    part.a += i * tile.lda;
    part.rows = rows;
    done = done && path.multiply_finished(part, epilogue_, row, column);
  });
  return done;
}

bool Destination::multiply(const Path& path, const Phase& phase, int64_t first,
                           const DepthwiseTile& tile, int64_t column, const int32_t* w_sums) {
  if (!path.depthwise_quantized) return false;
  epilogue_.w_sums = w_sums;
  bool done = true;
  each_run(phase, first, tile.pixels, [&](int64_t i, int64_t row, int64_t rows) {
    DepthwiseTile part = tile;
    part.pixel += i * tile.step;
    part.pixels = rows;
    done = done && path.depthwise_quantized(part, epilogue_, row, column);
  });
  return done;
}

at::Tensor convolved(const at::Tensor& x, const Geometry& g, Finish& finish, const Output* output,
                     at::ScalarType out_dtype, const std::function<void()>& run) {
  if (output) {
    finish.epilogue.quantizer = quantizer_of(*output, out_dtype);
    fold_clamps(finish.epilogue);
  } else {
    TORCH_CHECK(out_dtype == finish.type, "the epilogue gives ", finish.type, ", not ", out_dtype);
  }
  const Result result = result_of(x, g, out_dtype);
  if (result.rows.numel() == 0) return result.result;
  finish.epilogue.out_type = element_of(out_dtype, "out_dtype");
  finish.epilogue.out = result.rows.mutable_data_ptr();
  run();
  return finished(result, g);
}

}  // namespace qfuse
