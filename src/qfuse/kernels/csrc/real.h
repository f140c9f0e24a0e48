// Real activations times packed int8 weights, for any instruction set.
//
// Weights become floats exactly; their scales are in the epilogue. Where a weight is used by many
// rows a panel of it is widened once and multiplied from the cache; where it is not, widening
// happens in registers, so that memory is read at one byte per weight.
#pragma once

#include "vec.h"

namespace {

// Member `k` of each lane's group, as a float.
template <int K>
QFUSE_INLINE Floats member(Ints groups) {
  return __builtin_convertvector((groups << (24 - 8 * K)) >> 24, Floats);
}

// The same times 2^24, which saves the shift back. Masking runs where shifting does not.
template <int K>
QFUSE_INLINE Floats raised_member(Ints groups) {
  const Ints top = K == 3 ? groups : groups << (24 - 8 * K);
  return __builtin_convertvector(K == 0 ? top : top & static_cast<int32_t>(0xff000000), Floats);
}

QFUSE_INLINE Floats accumulated(Floats sum, Floats a, Floats b) {
#if defined(__FMA__) || defined(__AVX512F__)
  return fused(a, b, sum);
#else
  return a * b + sum;
#endif
}

void widen_to_f32(const int8_t* block, int64_t groups, float* panel) {
  for (int64_t g = 0; g < groups; ++g, panel += qfuse::kGroup * qfuse::kBlock) {
    for (int64_t column = 0; column < qfuse::kBlock; column += kLanes) {
      const int8_t* from = block + (g * qfuse::kBlock + column) * qfuse::kGroup;
      Ints w;
      __builtin_memcpy(&w, from, sizeof(w));
      Unrolled<qfuse::kGroup>::run([&]<int K>() QFUSE_LAMBDA {
        store(panel + K * qfuse::kBlock + column, member<K>(w), kLanes);
      });
    }
  }
}

// A tile of registers: Rows by Vectors.
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
  for (int64_t k = 0; k < t.groups * qfuse::kGroup; ++k, ++a, b += qfuse::kBlock) {
    Floats w[Vectors];
    Unrolled<Vectors>::run([&]<int I>()
                               QFUSE_LAMBDA { w[I] = load<Floats>(b + I * kLanes, kLanes); });
    Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
      const Floats x = broadcast(a[R * t.lda]);
      Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
        total[R * Vectors + I] = accumulated(total[R * Vectors + I], x, w[I]);
      });
    });
  }
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    store(to + (I / Vectors) * qfuse::kBlock + (I % Vectors) * kLanes, total[I], kLanes);
  });
}

// Calls f with the greatest constant up to Most that is at most `rows`, and returns it.
template <int Most, class F>
QFUSE_INLINE int64_t with_rows(int64_t rows, const F& f) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, f);
  }
  f.template operator()<Most>();
  return Most;
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

template <int Rows, int Vectors>
QFUSE_INLINE void stream_columns(const float* a, int64_t lda, const int8_t* block, int64_t groups,
                                 int64_t column, float* sums) {
  Floats total[Rows * Vectors] = {};
  const int8_t* b = block + column * qfuse::kGroup;
  for (int64_t g = 0; g < groups; ++g, a += qfuse::kGroup, b += qfuse::kBlock * qfuse::kGroup) {
    Ints w[Vectors];
    Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
      __builtin_memcpy(&w[I], b + I * kLanes * qfuse::kGroup, sizeof(w[I]));
      __builtin_prefetch(b + kAhead + I * kLanes * qfuse::kGroup);
    });
    Unrolled<qfuse::kGroup>::run([&]<int K>() QFUSE_LAMBDA {
      Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
        const Floats real = raised_member<K>(w[I]);
        Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
          total[R * Vectors + I] =
              accumulated(total[R * Vectors + I], broadcast(a[R * lda + K]), real);
        });
      });
    });
  }
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    store(sums + (I / Vectors) * qfuse::kBlock + column + (I % Vectors) * kLanes, total[I], kLanes);
  });
}

template <int Vectors>
void stream(const float* a, int64_t lda, int64_t rows, const int8_t* block, int64_t groups,
            int64_t columns, float* sums) {
  with_rows<qfuse::kStreamRows>(rows, [&]<int R>() {
    for (int64_t column = 0; column < columns; column += Vectors * kLanes) {
      stream_columns<R, Vectors>(a, lda, block, groups, column, sums);
    }
  });
}

// The kernels where there is nothing but float32: others are converted before.
template <int Rows, int Vectors>
constexpr qfuse::RealKernels f32_kernels{
    .type_for = [](qfuse::Real) { return qfuse::Real::f32; },
    .widen = [](const int8_t* block, int64_t groups, qfuse::Real,
                void* panel) { widen_to_f32(block, groups, static_cast<float*>(panel)); },
    .multiply = [](const qfuse::RealTile& tile, qfuse::Real,
                   float* sums) { multiply_f32<Rows, Vectors>(tile, sums); },
    .stream = &stream<Vectors>,
};

}  // namespace
