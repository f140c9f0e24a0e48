// The same as tiles.h, for processors without AMX: the registers are memory. So the kernels that
// use them are tested there. Sums of bfloat16 that are subnormal stay so.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa/tile_shapes.h"
#include "isa/vec.h"

namespace {

struct alignas(64) EmulatedTile {
  int32_t word[kTileRows][kTileBytes / 4];
};

thread_local EmulatedTile emulated[kTiles];
thread_local TileShapes emulated_shapes;

inline void load_shapes(const TileShapes& shapes) {
  emulated_shapes = shapes;
  std::memset(emulated, 0, sizeof(emulated));
}

inline void release_tiles() { emulated_shapes = {}; }

template <int T>
inline void clear_tile() {
  std::memset(&emulated[T], 0, sizeof(EmulatedTile));
}

template <int T>
inline void load_tile(const void* from, int64_t stride) {
  for (int i = 0; i < emulated_shapes.rows[T]; ++i) {
    std::memcpy(emulated[T].word[i], static_cast<const char*>(from) + i * stride,
                emulated_shapes.row_bytes[T]);
  }
}

template <int T>
inline void store_tile(void* to, int64_t stride) {
  for (int i = 0; i < emulated_shapes.rows[T]; ++i) {
    std::memcpy(static_cast<char*>(to) + i * stride, emulated[T].word[i],
                emulated_shapes.row_bytes[T]);
  }
}

// Calls f(sums, word of A, words of B) for each product of a tile.
template <int C, int A, int B, class F>
inline void each_product(const F& f) {
  for (int m = 0; m < emulated_shapes.rows[C]; ++m) {
    __m512i sum = _mm512_load_si512(emulated[C].word[m]);
    for (int k = 0; k < emulated_shapes.rows[B]; ++k) {
      sum = f(sum, _mm512_set1_epi32(emulated[A].word[m][k]),
              _mm512_load_si512(emulated[B].word[k]));
    }
    _mm512_store_si512(emulated[C].word[m], sum);
  }
}

struct UnsignedDot {
  template <int C, int A, int B>
  static void add() {
    each_product<C, A, B>([](__m512i sum, __m512i a, __m512i b) {
      return _mm512_dpbusd_epi32(sum, a, b);
    });
  }
};

// a = (a + 128) - 128, where the sum is an unsigned byte.
struct SignedDot {
  template <int C, int A, int B>
  static void add() {
    const __m512i middle = _mm512_set1_epi8(-128);
    each_product<C, A, B>([&](__m512i sum, __m512i a, __m512i b) {
      const __m512i moved = _mm512_dpbusd_epi32(_mm512_setzero_si512(), middle, b);
      return _mm512_sub_epi32(_mm512_dpbusd_epi32(sum, _mm512_xor_si512(a, middle), b), moved);
    });
  }
};

struct RealDot {
  template <int C, int A, int B>
  static void add() {
    for (int m = 0; m < emulated_shapes.rows[C]; ++m) {
      __m512 even = _mm512_setzero_ps(), odd = even;
      for (int k = 0; k < emulated_shapes.rows[B]; ++k) {
        const __m512i a = _mm512_set1_epi32(emulated[A].word[m][k]);
        const __m512i b = _mm512_load_si512(emulated[B].word[k]);
        even = _mm512_fmadd_ps(low(a), low(b), even);
        odd = _mm512_fmadd_ps(high(a), high(b), odd);
      }
      float* sums = reinterpret_cast<float*>(emulated[C].word[m]);
      _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(even, odd)));
    }
  }

 private:
  static __m512 low(__m512i x) { return normal(_mm512_slli_epi32(x, 16)); }
  static __m512 high(__m512i x) { return normal(_mm512_and_si512(x, _mm512_set1_epi32(-65536))); }

  // Zero in place of subnormal values.
  static __m512 normal(__m512i x) {
    const __m512i exponent = _mm512_and_si512(x, _mm512_set1_epi32(0x7f800000));
    return _mm512_castsi512_ps(
        _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(exponent, exponent), x));
  }
};

}  // namespace
