// AVX2 without dot product instructions of bytes.
#if defined(__x86_64__)
#include <immintrin.h>

#include "attention/few.h"
#include "convolution/copy_rows.h"
#include "convolution/depthwise.h"
#include "isa/widened.h"
#include "linear/finish.h"
#include "linear/groups_pairs.h"
#include "quantized/real.h"
#include "rowwise/rows.h"

namespace {

void release() {}

}  // namespace

QFUSE_PATH_LIBRARY(const qfuse::Path*) {
  static const qfuse::Path path{
      .name = "avx2",
      .tile_rows = &widened_tile_rows,
      .multiply = &multiply_widened,
      .depthwise = &depthwise,
      .copy_rows = &copy_rows,
      .finish = &finish,
      .finish_halves = &finish_halves,
      .release = &release,
      .real = &f32_kernels<6, 2>,
      .rows = &row_kernels,
      .groups = &group_kernels,
      .attention = &attention_kernels,
  };
  return &path;
}
#endif
