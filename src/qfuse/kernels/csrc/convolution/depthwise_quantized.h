// Depthwise sums that become quantized values without leaving the registers.
#pragma once

#include <type_traits>

#include "convolution/depthwise.h"
#include "linear/quantize_columns.h"

namespace {

// Constants in the order of the sums: of four channels of each 16 in turn.
QFUSE_INLINE void as_packed(__m512i (&x)[4]) {
  Sums<16> quarters[4];
  __builtin_memcpy(quarters, x, sizeof(quarters));
  const Fours<16> exchanged = in_order(quarters);
  __builtin_memcpy(x, exchanged.part, sizeof(quarters));
}

QFUSE_INLINE void as_packed(__m512i (&x)[2]) {
  const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  const __m512i first = x[0];
  x[0] = _mm512_permutex2var_epi64(first, low, x[1]);
  x[1] = _mm512_permutex2var_epi64(first, high, x[1]);
}

template <class Vector, int Vectors>
QFUSE_INLINE void as_packed(Vector (&constants)[Vectors]) {
  __m512i x[Vectors];
  __builtin_memcpy(x, constants, sizeof(x));
  as_packed(x);
  __builtin_memcpy(constants, x, sizeof(x));
}

// Whole vectors of the four sums of Lanes channels each.
template <int Lanes, int Vectors>
QFUSE_INLINE void as_vectors(const Sums<Lanes>* sums, Words (&to)[Vectors]) {
  static_assert(sizeof(Sums<Lanes>) * 4 == sizeof(to));
  Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
    if constexpr (Lanes == kLanes) {
      to[V] = bits<Words>(sums[V]);
    } else {
      const __m512i low = _mm512_castsi256_si512(bits<__m256i>(sums[2 * V]));
      to[V] = bits<Words>(_mm512_inserti64x4(low, bits<__m256i>(sums[2 * V + 1]), 1));
    }
  });
}

template <int Lanes, class Step>
bool depthwise_vectors(const qfuse::DepthwiseTile& t, const qfuse::Epilogue& e, int64_t row,
                       int64_t column) {
  constexpr int kWhole = 4 * Lanes / kLanes;
  SmallColumns<kWhole> c(e, column, t.channels);
  const Step step(e, row, column);
  if (!stays_small(e, c, step)) return false;
  as_packed(c.scale);
  as_packed(c.bias);
  as_packed(c.offset);
  const ClampedStore<kWhole, true> store(e.quantizer, e.out_type, t.channels);
  const float scale = e.x_scale[0], factor = e.quantizer.factor;
  auto* out = static_cast<int8_t*>(e.out) + (row - e.out_row) * e.out_ld + column;
  alignas(64) int32_t offsets[4 * Lanes];
  Unrolled<kWhole>::run([&]<int V>() QFUSE_LAMBDA {
    ::store(offsets + V * kLanes, bits<Ints>(-c.offset[V]), kLanes);
  });
  const auto run = [&]<bool Flip>() QFUSE_LAMBDA {
    each_pixels(t, [&]<bool Two>(int64_t i) QFUSE_LAMBDA {
      Sums<Lanes> sums[2][4];
      Unrolled<4>::run([&]<int V>() QFUSE_LAMBDA {
        __builtin_memcpy(&sums[0][V], offsets + V * Lanes, sizeof(Sums<Lanes>));
        sums[1][V] = sums[0][V];
      });
      add_pixels<Lanes, Flip, Two>(t, t.pixel + i * t.step, 0, sums[0], sums[1]);
      Unrolled<Two ? 2 : 1>::run([&]<int P>() QFUSE_LAMBDA {
        Words totals[kWhole];
        as_vectors<Lanes>(sums[P], totals);
        quantize_row(c, step, store, scale, factor, totals, out + (i + P) * e.out_ld);
      });
    });
  };
  if (t.flip) {
    run.template operator()<true>();
  } else {
    run.template operator()<false>();
  }
  return true;
}

// See Path::depthwise_quantized. An operand would have to be in the order of the sums.
bool depthwise_quantized(const qfuse::DepthwiseTile& t, const qfuse::Epilogue& e, int64_t row,
                         int64_t column) {
  if (t.channels <= 16) return false;
  return with_step(e, [&]<class Step>() {
    if constexpr (std::is_same_v<Step, NoStep> || std::is_same_v<Step, HardSwish>) {
      if (t.channels <= 32) return depthwise_vectors<8, Step>(t, e, row, column);
      return depthwise_vectors<16, Step>(t, e, row, column);
    }
    return false;
  });
}

}  // namespace
