// AVX512 with `vpdpbusd`: tiles of up to 6 rows by 64 columns, whose 24 sums stay in registers over
// all of K. B is read from the nearest cache that holds one block (K * 64 bytes), in order; meanwhile
// the block behind it is fetched. What needs no dot products of bytes is that of avx512.cpp.
#if defined(__x86_64__)
#include <immintrin.h>

#include "convolution/depthwise_quantized.h"
#include "digits/digits_avx512.h"
#include "digits/four_bits_avx512.h"
#include "linear/groups_avx512.h"
#include "linear/multiply_quantized.h"

namespace {

constexpr int kRows = 6;
// Rows that stay in the L2 cache while they are multiplied with all blocks.
constexpr int64_t kStripBytes = int64_t{512} << 10;

template <int Rows, int Vectors>
void multiply_tile(const qfuse::Tile& t, int32_t* sums) {
  __m512i total[Rows * Vectors];
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA { total[I] = _mm512_setzero_si512(); });
  add_tile<Rows, Vectors>(t, t.a, total);
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    _mm512_store_si512(sums + (I / Vectors) * qfuse::kBlock + (I % Vectors) * 16, total[I]);
  });
}

template <int Vectors>
void multiply_rows(const qfuse::Tile& t, int32_t* sums) {
  switch (t.rows) {
    case 1:
      return multiply_tile<1, Vectors>(t, sums);
    case 2:
      return multiply_tile<2, Vectors>(t, sums);
    case 3:
      return multiply_tile<3, Vectors>(t, sums);
    case 4:
      return multiply_tile<4, Vectors>(t, sums);
    case 5:
      return multiply_tile<5, Vectors>(t, sums);
    default:
      return multiply_tile<kRows, Vectors>(t, sums);
  }
}

void multiply(const qfuse::Tile& t, int32_t* sums) {
  switch ((t.columns + kLanes - 1) / kLanes) {
    case 1:
      return multiply_rows<1>(t, sums);
    case 2:
      return multiply_rows<2>(t, sums);
    case 3:
      return multiply_rows<3>(t, sums);
    default:
      return multiply_rows<4>(t, sums);
  }
}

int64_t tile_rows(int64_t) { return kRows; }

int64_t most_strip_rows(int64_t bytes) { return kStripBytes / (bytes > 0 ? bytes : 1); }

constexpr qfuse::DigitKernels digit_kernels{&split_row, &multiply_digits, &sum_segments,
                                            &multiply_four_bit_digits};

qfuse::Path path_with_dots(const qfuse::Path& avx512) {
  qfuse::Path path = avx512;
  path.name = "avx512_vnni";
  path.tile_rows = &tile_rows;
  path.flips_slowly = true;
  path.most_strip_rows = &most_strip_rows;
  path.multiply = &multiply;
  path.multiply_finished = &multiply_quantized;
  path.depthwise = &depthwise;
  path.depthwise_quantized = &depthwise_quantized;
  path.groups = &group_kernels;
  path.digits = &digit_kernels;
  return path;
}

}  // namespace

QFUSE_PATH_LIBRARY(const qfuse::Path* base) {
  static const qfuse::Path path = path_with_dots(*base);
  return &path;
}
#endif
