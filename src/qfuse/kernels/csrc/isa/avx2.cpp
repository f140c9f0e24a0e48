// AVX2 without dot product instructions: bytes widened to 16 bits, then `vpmaddwd`, which is exact
// (`vpmaddubsw` would saturate).
#if defined(__x86_64__)
#include <immintrin.h>

#include "convolution/copy_rows.h"
#include "convolution/depthwise.h"
#include "linear/finish.h"
#include "linear/groups_avx2.h"
#include "quantized/real.h"
#include "rowwise/rows.h"

namespace {

constexpr int64_t kRows = 4;
constexpr int64_t kPair = 16;  // columns that a tile of two vectors holds

// Bytes 0 and 2 of each group of four as 16-bit numbers, then bytes 1 and 3.
QFUSE_INLINE __m256i even_signed(__m256i b) {
  return _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8);
}
QFUSE_INLINE __m256i odd_signed(__m256i b) { return _mm256_srai_epi16(b, 8); }

template <int Rows>
void multiply_rows(const qfuse::Tile& t, const uint8_t* a, int64_t column, int32_t* sums) {
  __m256i total[Rows][2];
  for (int i = 0; i < Rows; ++i) total[i][0] = total[i][1] = _mm256_setzero_si256();
  const __m256i low = _mm256_set1_epi16(0xff);
  const int8_t* b = t.b + column * qfuse::kGroup;
  for (int64_t g = 0; g < t.groups; ++g, b += qfuse::kBlock * qfuse::kGroup) {
    const __m256i b0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m256i b1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 32));
    const __m256i even0 = even_signed(b0), odd0 = odd_signed(b0);
    const __m256i even1 = even_signed(b1), odd1 = odd_signed(b1);
    for (int i = 0; i < Rows; ++i) {
      uint32_t word;
      __builtin_memcpy(&word, a + i * t.lda + g * qfuse::kGroup, sizeof(word));
      const __m256i x = _mm256_set1_epi32(static_cast<int>(word ^ t.flip));
      const __m256i even = _mm256_and_si256(x, low);
      const __m256i odd = _mm256_srli_epi16(x, 8);
      total[i][0] = _mm256_add_epi32(total[i][0], _mm256_madd_epi16(even, even0));
      total[i][1] = _mm256_add_epi32(total[i][1], _mm256_madd_epi16(even, even1));
      total[i][0] = _mm256_add_epi32(total[i][0], _mm256_madd_epi16(odd, odd0));
      total[i][1] = _mm256_add_epi32(total[i][1], _mm256_madd_epi16(odd, odd1));
    }
  }
  for (int i = 0; i < Rows; ++i) {
    int32_t* to = sums + i * qfuse::kBlock + column;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), total[i][0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), total[i][1]);
  }
}

void multiply(const qfuse::Tile& t, int32_t* sums) {
  for (int64_t column = 0; column < t.columns; column += kPair) {
    switch (t.rows) {
      case 1:
        multiply_rows<1>(t, t.a, column, sums);
        break;
      case 2:
        multiply_rows<2>(t, t.a, column, sums);
        break;
      case 3:
        multiply_rows<3>(t, t.a, column, sums);
        break;
      default:
        multiply_rows<kRows>(t, t.a, column, sums);
    }
  }
}

int64_t tile_rows(int64_t) { return kRows; }

void release() {}

}  // namespace

namespace qfuse {

const Path& avx2_path() {
  static const Path path{
      .name = "avx2",
      .tile_rows = &tile_rows,
      .dense = false,
      .multiply = &multiply,
      .depthwise = &depthwise,
      .copy_rows = &copy_rows,
      .finish = &finish,
      .finish_halves = &finish_halves,
      .release = &release,
      .real = &f32_kernels<6, 2>,
      .rows = &row_kernels,
      .groups = &group_kernels,
  };
  return path;
}

}  // namespace qfuse
#endif
