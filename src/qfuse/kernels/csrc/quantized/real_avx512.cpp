// Float activations times packed weights with AVX512, in bfloat16 if the processor supports it.
#if defined(__x86_64__)
#include "quantized/real_avx512.h"

#include "isa/fetch.h"
#include "quantized/codes_bf16.h"
#include "quantized/real.h"

namespace {

constexpr int kRows = 6;
constexpr int kAllVectors = qfuse::kBlock / kLanes;

bool has_bf16() {
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has;
}

template <int Rows, int Vectors>
QFUSE_INLINE void multiply_bf16_rows(const qfuse::RealTile& t, int64_t row, float* sums) {
  Floats total[Rows * Vectors];
  float* to = sums + row * qfuse::kBlock;
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    const float* from = to + (I / Vectors) * qfuse::kBlock + (I % Vectors) * kLanes;
    total[I] = t.add ? load<Floats>(from, kLanes) : Floats{};
  });
  const uint16_t* a = static_cast<const uint16_t*>(t.a) + row * t.lda;
  const uint32_t* b = static_cast<const uint32_t*>(t.panel);
  Fetcher fetcher(t.following);
  for (int64_t k = 0; k < t.groups * 2; ++k, a += 2, b += qfuse::kBlock) {
    fetcher.step();
    Ints w[Vectors];
    Unrolled<Vectors>::run(
        [&]<int I>() QFUSE_LAMBDA { __builtin_memcpy(&w[I], b + I * kLanes, sizeof(w[I])); });
    Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
      int32_t both;
      __builtin_memcpy(&both, a + R * t.lda, sizeof(both));
      const Ints x = broadcast(both);
      Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA { dot(total[R * Vectors + I], x, w[I]); });
    });
  }
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    store(to + (I / Vectors) * qfuse::kBlock + (I % Vectors) * kLanes, total[I], kLanes);
  });
}

template <int Vectors>
void multiply_bf16(const qfuse::RealTile& t, float* sums) {
  for (int64_t row = 0; row < t.rows;) {
    row += with_rows<kRows>(t.rows - row,
                            [&]<int R>() { multiply_bf16_rows<R, Vectors>(t, row, sums); });
  }
}

qfuse::Real type_for(qfuse::Real x) {
  return x == qfuse::Real::bf16 && has_bf16() ? x : qfuse::Real::f32;
}

template <int Bits>
void widen(const qfuse::RealBlock& b, int64_t k, int64_t depth, qfuse::Real type, void* panel) {
  if (type == qfuse::Real::bf16) {
    return widen_to_bf16<Bits>(b, k, depth, static_cast<uint32_t*>(panel));
  }
  widen_to_f32<Bits>(b, k, depth, static_cast<float*>(panel));
}

// Minimum rows of a stream in bfloat16: converting bytes to pairs costs about what two rows save.
template <int Bits>
constexpr int64_t kLeastRows = Bits == 4 ? 1 : 3;

template <int Bits>
qfuse::Real stream_type(qfuse::Real x, int64_t rows) {
  return rows >= kLeastRows<Bits> ? type_for(x) : qfuse::Real::f32;
}

template <int Bits>
void stream(const qfuse::RealBlock& b, const void* a, int64_t lda, int64_t rows, int64_t columns,
            float* sums) {
  if (stream_type<Bits>(b.real, rows) == qfuse::Real::bf16) {
    return stream_bf16<Bits>(b, static_cast<const uint16_t*>(a), lda, rows, sums);
  }
  stream_f32<Bits, kAllVectors>(b, static_cast<const float*>(a), lda, rows, columns, sums);
}

template <int Vectors>
void multiply_vectors(const qfuse::RealTile& t, qfuse::Real type, float* sums) {
  if (type == qfuse::Real::bf16) return multiply_bf16<Vectors>(t, sums);
  multiply_f32<kRows, Vectors>(t, sums);
}

void multiply(const qfuse::RealTile& t, qfuse::Real type, float* sums) {
  switch ((t.columns + kLanes - 1) / kLanes) {
    case 1:
      return multiply_vectors<1>(t, type, sums);
    case 2:
      return multiply_vectors<2>(t, type, sums);
    case 3:
      return multiply_vectors<3>(t, type, sums);
    default:
      return multiply_vectors<kAllVectors>(t, type, sums);
  }
}

}  // namespace

namespace qfuse {

const RealKernels& real_avx512() {
  static const RealKernels kernels{&type_for,
                                   &multiply,
                                   &depthwise_f32,
                                   {&widen<4>, &stream_type<4>, &stream<4>},
                                   {&widen<8>, &stream_type<8>, &stream<8>},
                                   {&widen<kE4m3>, &stream_type<kE4m3>, &stream<kE4m3>},
                                   {&widen<kE5m2>, &stream_type<kE5m2>, &stream<kE5m2>},
                                   f32_codes<kHalf, kAllVectors>};
  return kernels;
}

}  // namespace qfuse
#endif
