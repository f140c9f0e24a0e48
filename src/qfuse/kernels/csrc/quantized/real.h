// Float activations times panels of float weights, for any instruction set.
#pragma once

#include "convolution/depthwise_f32.h"
#include "isa/fetch.h"
#include "quantized/codes.h"

namespace {

// A register tile of Rows by Vectors.
template <int Rows, int Vectors>
QFUSE_INLINE void multiply_f32_columns(const qfuse::RealTile& t, int64_t row, int64_t column,
                                       float* sums) {
  Floats total[Rows * Vectors];
  float* to = sums + row * qfuse::kBlock + column;
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    const float* from = to + (I / Vectors) * qfuse::kBlock + (I % Vectors) * kLanes;
    total[I] = t.add ? load<Floats>(from, kLanes) : Floats{};
  });
  const float* a = static_cast<const float*>(t.a) + row * t.lda;
  const float* b = static_cast<const float*>(t.panel) + column;
  Fetcher fetcher(t.following);
  for (int64_t g = 0; g < t.groups; ++g) {
    fetcher.step();
    Unrolled<qfuse::kGroup>::run([&]<int K>() QFUSE_LAMBDA {
      Floats w[Vectors];
      Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
        w[I] = load<Floats>(b + K * qfuse::kBlock + I * kLanes, kLanes);
      });
      Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
        const Floats x = broadcast(a[R * t.lda + K]);
        Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
          total[R * Vectors + I] = accumulated(total[R * Vectors + I], x, w[I]);
        });
      });
    });
    a += qfuse::kGroup;
    b += qfuse::kGroup * qfuse::kBlock;
  }
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    store(to + (I / Vectors) * qfuse::kBlock + (I % Vectors) * kLanes, total[I], kLanes);
  });
}

template <int Rows, int Vectors>
void multiply_f32(const qfuse::RealTile& t, float* sums) {
  for (int64_t row = 0; row < t.rows;) {
    row += with_rows<Rows>(t.rows - row, [&]<int R>() {
      for (int64_t column = 0; column < t.columns; column += Vectors * kLanes) {
        multiply_f32_columns<R, Vectors>(t, row, column, sums);
      }
    });
  }
}

// The kernels for float32 only: other types are converted before.
template <int Rows, int Vectors>
constexpr qfuse::RealKernels f32_kernels{
    .type_for = [](qfuse::Real) { return qfuse::Real::f32; },
    .multiply = [](const qfuse::RealTile& tile, qfuse::Real,
                   float* sums) { multiply_f32<Rows, Vectors>(tile, sums); },
    .depthwise = &depthwise_f32,
    .four = f32_codes<4, Vectors>,
    .eight = f32_codes<8, Vectors>,
    .e4m3 = f32_codes<kE4m3, Vectors>,
    .e5m2 = f32_codes<kE5m2, Vectors>,
    .half = f32_codes<kHalf, Vectors>,
};

}  // namespace
