// Where the results of a convolution go: an Epilogue for any run of output pixels.
#pragma once

#include <functional>
#include <vector>

#include "convolution/geometry.h"
#include "convolution/layout.h"
#include "convolution/convolution_a16.h"
#include "kernel_api.h"
#include "linear/int8_operands.h"
#include "linear/real_weight.h"
#include "rowwise/quantizer.h"

namespace qfuse {

// What is applied to the sums of a convolution, with the memory that it points to.
struct Finish {
  Epilogue epilogue{};
  std::vector<Extra> extras;
  at::ScalarType type;  // after the last epilogue op
  int32_t x_zero = 0;           // of unsigned bytes
  int32_t multiplied_zero = 0;  // of the bytes as multiplied
  std::vector<at::Tensor> kept;

  // `grouped`: sums are float and already scaled by the weight.
  Finish(const Int8Operands& operands, const Geometry& g, bool grouped = false);
  Finish(const WeightOnlyConvolution& convolution, const RealWeight& weight, const Geometry& g);
  Finish(const Finish&) = delete;
  Finish& operator=(const Finish&) = delete;
};

// Writes runs of output pixels of a phase; one for each thread.
class Destination {
 public:
  Destination(const Finish& finish, const Geometry& g);

  // Writes `count` pixels of a phase from `first` on, features [column, column + columns).
  // sums: of four bytes, as the epilogue says. x_sums: one for each of the pixels, or null.
  void write(const Path& path, const Phase& phase, int64_t first, int64_t count, int64_t column,
             int64_t columns, const void* sums, const int32_t* w_sums, const int32_t* x_sums);

  // Multiplies the rows of a tile, the pixels of a phase from `first` on, and writes them, if the
  // path does both at once; else returns false.
  bool multiply(const Path& path, const Phase& phase, int64_t first, const Tile& tile,
                int64_t column, const int32_t* w_sums);
  bool multiply(const Path& path, const Phase& phase, int64_t first, const DepthwiseTile& tile,
                int64_t column, const int32_t* w_sums);

 private:
  // Calls run(i, row, rows) for the runs of `count` pixels: the rows of the epilogue that hold the
  // pixels from the i-th on.
  template <class Run>
  void each_run(const Phase& phase, int64_t first, int64_t count, const Run& run);

  // Moves the epilogue to the run of pixels at a fixed distance that contains `pixel`.
  void move(const Phase& phase, int64_t pixel);

  const Finish& finish_;
  const Geometry& g_;
  Epilogue epilogue_;
  const Phase* phase_ = nullptr;  // of the run
  int64_t first_ = 0;
  int64_t end_ = 0;
};

// Returns the result that `run` writes rows of: floats, or quantized values if `output` is set.
// Completes `finish`. `run` is not called for an empty result.
at::Tensor convolved(const at::Tensor& x, const Geometry& g, Finish& finish, const Output* output,
                     at::ScalarType out_dtype, const std::function<void()>& run);

}  // namespace qfuse
