// The path for any processor: the compiler's vector types, without specific instructions.
#include "attention/few.h"
#include "convolution/copy_rows.h"
#include "convolution/depthwise.h"
#include "linear/finish.h"
#include "linear/groups.h"
#include "quantized/real.h"
#include "rowwise/rows.h"

namespace {

// Two 16-bit numbers in each lane.
QFUSE_INLINE Shorts pairs(uint32_t low, uint32_t high) {
  return bits<Shorts>(Words{} + (low | high << 16));
}

// The products of one vector of features with a row, two members of a group at a time: u8 x s8 fits
// into 16 bits, and each lane holds the two products of its feature.
QFUSE_INLINE Words both(Shorts products) {
  const Ints p = bits<Ints>(products);
  return bits<Words>((p << 16) >> 16) + bits<Words>(p >> 16);
}

void multiply(const qfuse::Tile& t, int32_t* sums) {
  for (int64_t i = 0; i < t.rows; ++i) {
    for (int64_t column = 0; column < t.columns; column += kLanes) {
      const uint8_t* a = t.a + i * t.lda;
      const int8_t* b = t.b + column * qfuse::kGroup;
      Words total = {};  // unsigned: intermediate sums may wrap
      for (int64_t g = 0; g < t.groups; ++g) {
        uint8_t x[qfuse::kGroup];
        for (int64_t k = 0; k < qfuse::kGroup; ++k) {
          x[k] = static_cast<uint8_t>(a[g * qfuse::kGroup + k] ^ t.flip);
        }
        Shorts w;
        __builtin_memcpy(&w, b + g * qfuse::kBlock * qfuse::kGroup, sizeof(w));
        const Shorts even = (w << 8) >> 8;
        const Shorts odd = w >> 8;
        total += both(even * pairs(x[0], x[2])) + both(odd * pairs(x[1], x[3]));
      }
      store(sums + i * qfuse::kBlock + column, bits<Ints>(total), kLanes);
    }
  }
}

int64_t tile_rows(int64_t) { return 4; }

void release() {}

constexpr qfuse::GroupKernels group_kernels{&unpack, &add_group, nullptr, nullptr};

}  // namespace

QFUSE_PATH_LIBRARY(const qfuse::Path*) {
  static const qfuse::Path path{
      .name = "portable",
      .tile_rows = &tile_rows,
      .multiply = &multiply,
      .depthwise = &depthwise,
      .copy_rows = &copy_rows,
      .finish = &finish,
      .finish_halves = &finish_halves,
      .release = &release,
      .real = &f32_kernels<4, 2>,
      .rows = &row_kernels,
      .groups = &group_kernels,
      .attention = &attention_kernels,
  };
  return &path;
}
