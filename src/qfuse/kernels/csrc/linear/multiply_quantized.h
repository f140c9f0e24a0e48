// Products whose sums become quantized values without leaving the registers, with `vpdpbusd`.
#pragma once

#include "isa/fetch.h"
#include "linear/quantize_columns.h"

namespace {

// sum += dot products of four u8 of a with four s8 of b. With the intrinsic, GCC copies the
// register of every sum before each instruction, which halves the speed.
QFUSE_INLINE void dot(__m512i& sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// Products of a tile, whose bytes of a have to be flipped or not. Intel's processors flip in the units
// that multiply.
template <bool Flips, int Rows, int Vectors>
QFUSE_INLINE void add_products(const qfuse::Tile& t, const uint8_t* a, __m512i* total) {
  const __m512i flip = _mm512_set1_epi32(static_cast<int>(t.flip));
  const int8_t* b = t.b;
  Fetcher fetcher(t.following);
  for (int64_t g = 0; g < t.groups; ++g, a += qfuse::kGroup, b += qfuse::kBlock * qfuse::kGroup) {
    fetcher.step();
    __m512i column[Vectors];
    Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
      column[I] = _mm512_loadu_si512(b + 64 * I);
    });
    Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
      int word;
      __builtin_memcpy(&word, a + R * t.lda, sizeof(word));
      __m512i x = _mm512_set1_epi32(word);
      if constexpr (Flips) x = _mm512_xor_si512(x, flip);
      Unrolled<Vectors>::run([&]<int I>()
                                 QFUSE_LAMBDA { dot(total[R * Vectors + I], x, column[I]); });
    });
  }
}

// Adds the products of a tile to the sums of Rows rows by Vectors vectors.
template <int Rows, int Vectors>
QFUSE_INLINE void add_tile(const qfuse::Tile& t, const uint8_t* a, __m512i* total) {
  if (t.flip) {
    add_products<true, Rows, Vectors>(t, a, total);
  } else {
    add_products<false, Rows, Vectors>(t, a, total);
  }
}

// The operand of a row is read once, and its rows lie far apart: no hardware prefetches them, and
// the products of a tile outlast the instructions that a core looks ahead.
constexpr int64_t kTilesAhead = 2;

// Rows of a tile, from `row` of it on, to `out`.
template <int Rows, int Vectors, class Step>
QFUSE_INLINE void quantize_products(const qfuse::Tile& t, int64_t row, const qfuse::Epilogue& e,
                                    const SmallColumns<Vectors>& c, Step& step,
                                    const ClampedStore<Vectors>& store, int8_t* out) {
  Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
    step.prefetch(kTilesAhead * Rows + R);
    __builtin_prefetch(out + R * e.out_ld, 1);
  });
  __m512i total[Rows * Vectors];
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    total[I] = bits<__m512i>(-c.offset[I % Vectors]);
  });
  add_tile<Rows, Vectors>(t, t.a + row * t.lda, total);
  const float scale = e.x_scale[0], factor = e.quantizer.factor;
  Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
    Words totals[Vectors];
    Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
      totals[I] = bits<Words>(total[R * Vectors + I]);
    });
    quantize_row(c, step, store, scale, factor, totals, out + R * e.out_ld);
    step.advance();
  });
}

template <int Vectors, class Step>
bool multiply_vectors(const qfuse::Tile& t, const qfuse::Epilogue& e, int64_t row, int64_t column) {
  const SmallColumns<Vectors> c(e, column, t.columns);
  Step step(e, row, column);
  if (!stays_small(e, c, step)) return false;
  const ClampedStore<Vectors> store(e.quantizer, e.out_type, t.columns);
  auto* out = static_cast<int8_t*>(e.out) + (row - e.out_row) * e.out_ld + column;
  int64_t i = 0;
  const auto run = [&]<int Rows>() QFUSE_LAMBDA {
    for (; i + Rows <= t.rows; i += Rows) {
      quantize_products<Rows, Vectors>(t, i, e, c, step, store, out + i * e.out_ld);
    }
  };
  run.template operator()<6>();
  run.template operator()<3>();
  run.template operator()<1>();
  return true;
}

// See Path::multiply_finished.
bool multiply_quantized(const qfuse::Tile& t, const qfuse::Epilogue& e, int64_t row,
                        int64_t column) {
  return with_step(e, [&]<class Step>() {
    return with_vectors(t.columns, [&]<int Vectors>() {
      return multiply_vectors<Vectors, Step>(t, e, row, column);
    });
  });
}

}  // namespace
