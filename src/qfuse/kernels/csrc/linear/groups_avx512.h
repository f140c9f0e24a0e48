// Blocks of groupwise weights with `vpdpbusd`; 4-bit values are unpacked in registers. Tiles of up
// to 6 rows by 64 columns, whose 24 integer sums stay in registers for a group.
#pragma once

#include <immintrin.h>

#include "isa/fetch.h"
#include "linear/groups.h"

namespace {

constexpr int kGroupRows = 6;

// sum += dot products of four u8 of a with four s8 of b; GCC's intrinsic would copy registers.
QFUSE_INLINE void group_dot(Words& sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

QFUSE_INLINE __m512i broadcast_word(const uint8_t* from) {
  int word;
  __builtin_memcpy(&word, from, sizeof(word));
  return _mm512_set1_epi32(word);
}

// Eight k of unsigned 4-bit values, with signed bytes.
template <int Rows>
QFUSE_INLINE void multiply_codes(const uint8_t* a, int64_t lda, const uint8_t* b, Words* total) {
  __m512i mask = _mm512_set1_epi8(15);
  asm("" : "+v"(mask));  // one register, not one for each use
  __m512i w[kColumnVectors];
  const auto multiply = [&](const uint8_t* from) QFUSE_LAMBDA {
    Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
      const __m512i x = broadcast_word(from + R * lda);
      Unrolled<kColumnVectors>::run([&]<int V>() QFUSE_LAMBDA {
        group_dot(total[R * kColumnVectors + V], w[V], x);
      });
    });
  };
  // Loaded twice, because keeping the value would take registers from the sums. Named captures:
  // clang 14 does not see what only an asm statement uses.
  Unrolled<kColumnVectors>::run([&w, &mask, b]<int V>() QFUSE_LAMBDA {
    asm("vpandd %2, %1, %0" : "=v"(w[V]) : "v"(mask), "m"(*(const __m512i_u*)(b + 64 * V)));
  });
  multiply(a);
  Unrolled<kColumnVectors>::run([&w, &mask, b]<int V>() QFUSE_LAMBDA {
    asm("vpsrld $4, %1, %0" : "=v"(w[V]) : "m"(*(const __m512i_u*)(b + 64 * V)));
    w[V] = _mm512_and_si512(w[V], mask);
  });
  multiply(a + qfuse::kGroup);
}

// What the bytes of a block of weights are.
enum class Stored { codes, bytes, unpacked };

// Four k of bytes, of which either those of the rows or the weights are unsigned.
template <Stored W, int Rows>
QFUSE_INLINE void multiply_bytes(const uint8_t* a, int64_t lda, const uint8_t* b, Words* total) {
  __m512i w[kColumnVectors];
  Unrolled<kColumnVectors>::run(
      [&]<int V>() QFUSE_LAMBDA { w[V] = _mm512_loadu_si512(b + 64 * V); });
  Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
    const __m512i x = broadcast_word(a + R * lda);
    Unrolled<kColumnVectors>::run([&]<int V>() QFUSE_LAMBDA {
      if constexpr (W == Stored::unpacked) {
        group_dot(total[R * kColumnVectors + V], w[V], x);
      } else {
        group_dot(total[R * kColumnVectors + V], x, w[V]);
      }
    });
  });
}

constexpr int32_t kNoZeros[kGroupRows] = {};

// The zero points of rows, negated, in the low halves of words.
template <int Rows>
struct NegatedZeros {
  QFUSE_INLINE explicit NegatedZeros(const int32_t* zeros) {
    for (int i = 0; i < Rows; ++i) word[i] = -zeros[i] & 0xffff;
  }

  // sum -= zero of a row * numbers, which are less than 2^15: one instruction instead of three.
  QFUSE_INLINE void add(Words& sum, int row, __m512i numbers) const {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(_mm512_set1_epi32(word[row])), "v"(numbers));
  }

  int32_t word[Rows];
};

// Adds the groups from `first` until `last` to totals; the weights begin with the first one. `Low`
// is whether the sums of weights fit 16 bits.
template <Stored W, int Rows, class Has, bool Low>
void multiply_groups(const qfuse::GroupTile& t, int64_t first, int64_t last, float* totals) {
  constexpr int kTotals = Rows * kColumnVectors;
  constexpr bool kCodes = W == Stored::codes;
  constexpr int64_t kStep = kCodes ? 2 : 1;  // groups of four k per iteration
  const uint8_t* a = t.a + first * t.depth * qfuse::kGroup;
  const uint8_t* b = t.b;
  const qfuse::Groups& g = t.groups;
  // Few rows with whole blocks read weights from memory, others from a cache.
  const bool fetches = Rows <= qfuse::kStreamRows && W != Stored::unpacked && first == 0 &&
                       last == g.count;
  // What is left to add at the end of a group.
  using Left = Zeros<Has::kX && !Low, Has::kW>;
  const NegatedZeros<Rows> zeros(Has::kX && Low ? g.x_zero : kNoZeros);
  Fetcher fetcher(t.following);
  for (int64_t group = first; group < last; ++group) {
    fetcher.step();
    if (fetches) fetch_columns<Has>(g, group);
    Words total[kTotals];
    Unrolled<kTotals>::run([&]<int I>() QFUSE_LAMBDA {
      total[I] = start_of<Has>(g, group, I / kColumnVectors);
    });
    if constexpr (Has::kX && Low) {
      Unrolled<kColumnVectors>::run([&]<int V>() QFUSE_LAMBDA {
        const auto numbers = bits<__m512i>(w_sums(g, group * qfuse::kBlock + V * kLanes));
        Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
          zeros.add(total[R * kColumnVectors + V], R, numbers);
        });
      });
    }
    for (int64_t k = 0; k < t.depth; k += kStep) {
      if (fetches) fetch_weights<qfuse::kBlock * qfuse::kGroup>(b);
      if constexpr (kCodes) {
        multiply_codes<Rows>(a, t.lda, b, total);
      } else {
        multiply_bytes<W, Rows>(a, t.lda, b, total);
      }
      a += kStep * qfuse::kGroup;
      b += qfuse::kBlock * qfuse::kGroup;
    }
    add_shares<Rows, kColumnVectors, Left>(g, group, 0, total, totals);
  }
}

// Whole blocks, although fewer columns may be needed: the padding is zero.
template <Stored W>
void multiply_some_groups(const qfuse::GroupTile& t, int64_t first, int64_t last, float* totals) {
  in_tiles<kGroupRows>(t, totals, [&]<int Rows, class Has>(const auto& some, float* to) {
    if (Has::kX && some.groups.short_sums) {
      multiply_groups<W, Rows, Has, Has::kX>(some, first, last, to);
    } else {
      multiply_groups<W, Rows, Has, false>(some, first, last, to);
    }
  });
}

template <Stored W>
void multiply_group_tile(const qfuse::GroupTile& t, float* totals) {
  multiply_some_groups<W>(t, 0, t.groups.count, totals);
}

// Each tile reads these groups from the L1 cache. Rows are signed with 4-bit values.
void multiply_panel(const qfuse::GroupTile& t, int64_t first, int64_t last, float* totals) {
  if (t.is_signed) return multiply_some_groups<Stored::unpacked>(t, first, last, totals);
  multiply_some_groups<Stored::bytes>(t, first, last, totals);
}

constexpr qfuse::GroupKernels group_kernels{&unpack,
                                            &add_group,
                                            &multiply_group_tile<Stored::codes>,
                                            &multiply_group_tile<Stored::bytes>,
                                            &multiply_panel,
                                            kGroupRows,
                                            kGroupRows};

}  // namespace
