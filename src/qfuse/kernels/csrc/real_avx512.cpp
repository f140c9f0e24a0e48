// Real activations times int8 weights with AVX512, in bfloat16 where the processor multiplies that.
#if defined(__x86_64__)
#include "real_avx512.h"

#include "real.h"

namespace {

constexpr int kRows = 6;
constexpr int kAllVectors = qfuse::kBlock / kLanes;

// sum += dot products of two bfloat16 of a with two of b; an instruction of AVX512_BF16, which this
// file is not compiled for, since float32 works without.
QFUSE_INLINE void dot(Floats& sum, Ints a, Ints b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

bool has_bf16() {
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has;
}

// Whole numbers of 8 bits are exact in bfloat16: the low half of their float32 is zero.
QFUSE_INLINE Words pair(Floats low, Floats high) {
  return bits<Words>(high) | (bits<Words>(low) >> 16);
}

void widen_to_bf16(const int8_t* block, int64_t groups, uint32_t* panel) {
  for (int64_t g = 0; g < groups; ++g, panel += 2 * qfuse::kBlock) {
    for (int64_t column = 0; column < qfuse::kBlock; column += kLanes) {
      Ints w;
      __builtin_memcpy(&w, block + (g * qfuse::kBlock + column) * qfuse::kGroup, sizeof(w));
      store(panel + column, pair(member<0>(w), member<1>(w)), kLanes);
      store(panel + qfuse::kBlock + column, pair(member<2>(w), member<3>(w)), kLanes);
    }
  }
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
  for (int64_t k = 0; k < t.groups * 2; ++k, a += 2, b += qfuse::kBlock) {
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

void widen(const int8_t* block, int64_t groups, qfuse::Real type, void* panel) {
  if (type == qfuse::Real::bf16) {
    return widen_to_bf16(block, groups, static_cast<uint32_t*>(panel));
  }
  widen_to_f32(block, groups, static_cast<float*>(panel));
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
  static const RealKernels kernels{&type_for, &widen, &multiply, &stream<kAllVectors>};
  return kernels;
}

}  // namespace qfuse
#endif
