// Blocks of groupwise weights with the 256-bit `vpdpbusd`; 4-bit values are unpacked in registers.
// For the file that defines QFUSE_DOT, see isa/avx_vnni.h.
#pragma once

#include <immintrin.h>

#include "linear/groups.h"

namespace {

constexpr int kGroupRows = 4;
constexpr int kGroupVectors = 2;  // at a time, of the eight of a block

// sum += dot products of four u8 of a with four s8 of b. With an intrinsic, GCC would copy
// registers.
QFUSE_INLINE void dot(Words& sum, Words a, Words b) {
  asm(QFUSE_DOT " %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}

QFUSE_INLINE Words broadcast_word(const uint8_t* from) {
  uint32_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return Words{} + word;
}

// Eight k of unsigned 4-bit values, with signed bytes.
template <int Rows>
QFUSE_INLINE void multiply_codes(const uint8_t* a, int64_t lda, const uint8_t* b, Words* total) {
  Words both[kGroupVectors], w[kGroupVectors];
  const auto multiply = [&](const uint8_t* from) QFUSE_LAMBDA {
    Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
      const Words x = broadcast_word(from + R * lda);
      Unrolled<kGroupVectors>::run(
          [&]<int V>() QFUSE_LAMBDA { dot(total[R * kGroupVectors + V], w[V], x); });
    });
  };
  Unrolled<kGroupVectors>::run([&]<int V>() QFUSE_LAMBDA {
    __builtin_memcpy(&both[V], b + 4 * kLanes * V, sizeof(both[V]));
    w[V] = both[V] & 0x0f0f0f0fu;
  });
  multiply(a);
  Unrolled<kGroupVectors>::run(
      [&]<int V>() QFUSE_LAMBDA { w[V] = (both[V] >> 4) & 0x0f0f0f0fu; });
  multiply(a + qfuse::kGroup);
}

// Four k of signed bytes with unsigned ones.
template <int Rows>
QFUSE_INLINE void multiply_bytes(const uint8_t* a, int64_t lda, const uint8_t* b, Words* total) {
  Words w[kGroupVectors];
  Unrolled<kGroupVectors>::run([&]<int V>() QFUSE_LAMBDA {
    __builtin_memcpy(&w[V], b + 4 * kLanes * V, sizeof(w[V]));
  });
  Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
    const Words x = broadcast_word(a + R * lda);
    Unrolled<kGroupVectors>::run(
        [&]<int V>() QFUSE_LAMBDA { dot(total[R * kGroupVectors + V], x, w[V]); });
  });
}

template <bool Codes, int Rows, class Has>
void multiply_group(const qfuse::GroupTile& t, int64_t group, int64_t vector, bool fetches,
                    float* totals) {
  constexpr int kTotals = Rows * kGroupVectors;
  constexpr int64_t kStep = Codes ? 2 : 1;  // groups of four k per iteration
  const uint8_t* a = t.a + group * t.depth * qfuse::kGroup;
  const int64_t steps = t.depth / kStep;
  const uint8_t* b = t.b + group * steps * qfuse::kBlock * qfuse::kGroup + vector * 4 * kLanes;
  Words total[kTotals];
  Unrolled<kTotals>::run([&]<int I>() QFUSE_LAMBDA {
    total[I] = start_of<Has>(t.groups, group, I / kGroupVectors);
  });
  for (int64_t i = 0; i < steps; ++i) {
    if (fetches) fetch_weights<kGroupVectors * 4 * kLanes>(b);
    if constexpr (Codes) {
      multiply_codes<Rows>(a, t.lda, b, total);
    } else {
      multiply_bytes<Rows>(a, t.lda, b, total);
    }
    a += kStep * qfuse::kGroup;
    b += qfuse::kBlock * qfuse::kGroup;
  }
  add_shares<Rows, kGroupVectors, Has>(t.groups, group, vector, total, totals);
}

// Whole blocks, although fewer columns may be needed: the padding is zero. A group of all columns
// is contiguous in memory, so groups are the outer loop.
template <bool Codes>
void multiply_group_tile(const qfuse::GroupTile& t, float* totals) {
  in_tiles<kGroupRows>(t, totals, [&]<int Rows, class Has>(const auto& some, float* to) {
    const bool fetches = some.a == t.a;  // the other rows read the weights from a cache
    for (int64_t group = 0; group < some.groups.count; ++group) {
      if (fetches) fetch_columns<Has>(some.groups, group);
      for (int64_t v = 0; v < kColumnVectors; v += kGroupVectors) {
        multiply_group<Codes, Rows, Has>(some, group, v, fetches, to);
      }
    }
  });
}

constexpr qfuse::GroupKernels group_kernels{&unpack, &add_group, &multiply_group_tile<true>,
                                            &multiply_group_tile<false>};

}  // namespace
