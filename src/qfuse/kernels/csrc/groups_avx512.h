// Blocks of weights in groups with `vpdpbusd`, codes of four bits taken apart in registers: tiles of
// up to 6 rows by 64 columns, whose 24 integer sums stay in registers for a group.
#pragma once

#include <immintrin.h>

#include "groups.h"

namespace {

constexpr int kGroupRows = 6;

// sum += dot products of four u8 of a with four s8 of b; as an intrinsic it would copy registers.
QFUSE_INLINE void group_dot(Words& sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

QFUSE_INLINE __m512i broadcast_word(const uint8_t* from) {
  int word;
  __builtin_memcpy(&word, from, sizeof(word));
  return _mm512_set1_epi32(word);
}

// Eight k of four-bit codes, which are unsigned, with signed bytes.
template <int Rows, int Vectors>
QFUSE_INLINE void multiply_codes(const uint8_t* a, int64_t lda, const uint8_t* b, Words* total) {
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i w[Vectors];
  const auto multiply = [&](const uint8_t* from) QFUSE_LAMBDA {
    Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
      const __m512i x = broadcast_word(from + R * lda);
      Unrolled<Vectors>::run([&]<int I>()
                                 QFUSE_LAMBDA { group_dot(total[R * Vectors + I], w[I], x); });
    });
  };
  // Read twice: registers that kept what was read would be missing for sums.
  Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    asm("vpandd %2, %1, %0" : "=v"(w[I]) : "v"(mask), "m"(*(const __m512i_u*)(b + 64 * I)));
  });
  multiply(a);
  Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    asm("vpsrld $4, %1, %0" : "=v"(w[I]) : "m"(*(const __m512i_u*)(b + 64 * I)));
    w[I] = _mm512_and_si512(w[I], mask);
  });
  multiply(a + qfuse::kGroup);
}

// Four k of signed bytes with unsigned ones.
template <int Rows, int Vectors>
QFUSE_INLINE void multiply_bytes(const uint8_t* a, int64_t lda, const uint8_t* b, Words* total) {
  __m512i w[Vectors];
  Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA { w[I] = _mm512_loadu_si512(b + 64 * I); });
  Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
    const __m512i x = broadcast_word(a + R * lda);
    Unrolled<Vectors>::run([&]<int I>()
                               QFUSE_LAMBDA { group_dot(total[R * Vectors + I], x, w[I]); });
  });
}

template <bool Codes, int Rows, int Vectors>
void multiply_groups(const qfuse::GroupTile& t, float* totals) {
  constexpr int64_t kStep = Codes ? 2 : 1;  // groups of four k that are read at once
  const uint8_t* a = t.a;
  const uint8_t* b = t.b;
  const qfuse::Groups& g = t.groups;
  for (int64_t group = 0; group < g.count; ++group) {
    Words total[Rows * Vectors];
    Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
      total[I] = Words{} + static_cast<uint32_t>(start_of(g, group, I / Vectors));
    });
    for (int64_t k = 0; k < t.depth; k += kStep) {
      if constexpr (Rows <= 2) {
        Unrolled<Vectors>::run(
            [&]<int I>() QFUSE_LAMBDA { _mm_prefetch(b + kAhead + 64 * I, _MM_HINT_T0); });
      }
      if constexpr (Codes) {
        multiply_codes<Rows, Vectors>(a, t.lda, b, total);
      } else {
        multiply_bytes<Rows, Vectors>(a, t.lda, b, total);
      }
      a += kStep * qfuse::kGroup;
      b += qfuse::kBlock * qfuse::kGroup;
    }
    Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
      const GroupColumn column(g, group, V);
      Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
        float* to = totals + R * qfuse::kBlock + V * kLanes;
        const Floats part = share(g, column, total[R * Vectors + V], group, R);
        store(to, load<Floats>(to, kLanes) + part, kLanes);
      });
    });
  }
}

template <bool Codes, int Rows>
void multiply_group_rows(const qfuse::GroupTile& t, float* totals) {
  if constexpr (Rows > 1) {
    if (t.rows < Rows) return multiply_group_rows<Codes, Rows - 1>(t, totals);
  }
  switch ((t.columns + kLanes - 1) / kLanes) {
    case 1:
      return multiply_groups<Codes, Rows, 1>(t, totals);
    case 2:
      return multiply_groups<Codes, Rows, 2>(t, totals);
    case 3:
      return multiply_groups<Codes, Rows, 3>(t, totals);
    default:
      return multiply_groups<Codes, Rows, 4>(t, totals);
  }
}

}  // namespace
