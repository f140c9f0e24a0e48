// Blocks of 8-bit weights times rows of digits with `vpdpbusd`: a digit costs one instruction per
// vector of weights, which need no conversion. Weights with flipped sign bits are the unsigned
// operand, digits the signed one, which the instruction broadcasts from memory.
#pragma once

#include <immintrin.h>

#include "isa/fetch.h"
#include "isa/vec.h"
#include "digits/split_digits.h"

namespace {

constexpr int kDigitVectors = qfuse::kBlock / kLanes;
constexpr int kDigitTotals = 6;  // digits whose sums of a block fit into the registers
// Groups of four k that are read again from the L1 cache for more digits: a page, since with longer
// slices memory waits while a slice is read again.
constexpr int64_t kDigitSlice = 16;
// Groups of four k after which the rests among them are added, from the L1 cache as well: the L2
// cache does not keep all of a stream.
constexpr int64_t kDigitStrip = 32;

// sum += dot products of four u8 with four s8.
QFUSE_INLINE void digit_dot(__m512i& sum, __m512i weights, const int8_t* digits) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(sum)
      : "v"(weights), "m"(*reinterpret_cast<const int32_t*>(digits)));
}

// Adds the products of some groups of four k to [Rows][Digits][64] sums. Inlined, two of them spill.
template <int Rows, int Digits>
__attribute__((noinline)) void add_digits(const uint8_t* w, const int8_t* x, int64_t step, int64_t groups,
                             int32_t* sums) {
  constexpr int kTotals = Rows * Digits * kDigitVectors;
  __m512i flip = _mm512_set1_epi8(-128);
  asm("" : "+v"(flip));  // one register, not one for each use
  __m512i total[kTotals];
  Unrolled<kTotals>::run(
      [&]<int I>() QFUSE_LAMBDA { total[I] = _mm512_load_si512(sums + I * kLanes); });
  for (int64_t g = 0; g < groups; ++g, w += qfuse::kBlock * qfuse::kGroup, x += step) {
    fetch_weights<64 * kDigitVectors>(w);
    __m512i codes[kDigitVectors];
    Unrolled<kDigitVectors>::run([&]<int V>() QFUSE_LAMBDA {
      codes[V] = _mm512_xor_si512(flip, _mm512_loadu_si512(w + 64 * V));
    });
    Unrolled<Rows * Digits>::run([&]<int P>() QFUSE_LAMBDA {
      const int8_t* digits = x + P / Digits * qfuse::kDigitBytes + P % Digits * qfuse::kGroup;
      Unrolled<kDigitVectors>::run(
          [&]<int V>() QFUSE_LAMBDA { digit_dot(total[P * kDigitVectors + V], codes[V], digits); });
    });
  }
  Unrolled<kTotals>::run(
      [&]<int I>() QFUSE_LAMBDA { _mm512_store_si512(sums + I * kLanes, total[I]); });
}

// Adds a slice for all rows, in passes of few.
template <int Rows, int Digits>
QFUSE_INLINE void add_slice(const uint8_t* w, const int8_t* x, int64_t step, int64_t groups,
                            int32_t* sums) {
  if constexpr (Rows * Digits <= kDigitTotals) {
    add_digits<Rows, Digits>(w, x, step, groups, sums);
  } else {
    constexpr int kHalf = Rows / 2;
    add_slice<Rows - kHalf, Digits>(w, x, step, groups, sums);
    add_slice<kHalf, Digits>(w, x + (Rows - kHalf) * qfuse::kDigitBytes, step, groups,
                             sums + (Rows - kHalf) * Digits * qfuse::kBlock);
  }
}

// Adds the products of rests before input feature `end` to [64] sums, and moves `from` behind them.
inline void add_rests(const qfuse::RealBlock& b, const qfuse::DigitRow& row, int64_t end, int64_t& from,
                      float* sums) {
  for (; from < row.rests && row.rest[from].k < end; ++from) {
    const qfuse::Rest rest = row.rest[from];
    const uint8_t* codes = b.codes + rest.k / qfuse::kGroup * qfuse::kBlock * qfuse::kGroup;
    const int shift = 24 - 8 * static_cast<int>(rest.k % qfuse::kGroup);
    Unrolled<kDigitVectors>::run([&]<int V>() QFUSE_LAMBDA {
      Ints weight;
      __builtin_memcpy(&weight, codes + 64 * V, sizeof(weight));
      weight = (weight << shift) >> 24;
      if (b.zero) weight -= widened(load<Bytes>(b.zero + V * kLanes, kLanes));
      float* to = sums + V * kLanes;
      const Floats share = __builtin_convertvector(weight, Floats);
      store(to, fused(share, broadcast(rest.value), load<Floats>(to, kLanes)), kLanes);
    });
  }
}

// [Rows][Digits][64] sums of digits, and [Rows][64] of rests.
template <int Rows, int Digits>
void digit_sums(const qfuse::DigitTile& t, int32_t* sums, float* rests) {
  constexpr int64_t kStep = Rows * qfuse::kDigitBytes;
  constexpr int64_t kSlice = Rows * Digits <= kDigitTotals ? kDigitStrip : kDigitSlice;
  const int64_t groups = t.block.depth / qfuse::kGroup;
  int64_t done[Rows] = {};
  __builtin_memset(sums, 0, Rows * Digits * qfuse::kBlock * sizeof(int32_t));
  __builtin_memset(rests, 0, Rows * qfuse::kBlock * sizeof(float));
  for (int64_t g = 0; g < groups; g += kDigitStrip) {
    const int64_t end = groups - g < kDigitStrip ? groups : g + kDigitStrip;
    for (int64_t at = g; at < end; at += kSlice) {
      const int64_t count = end - at < kSlice ? end - at : kSlice;
      add_slice<Rows, Digits>(t.block.codes + at * qfuse::kBlock * qfuse::kGroup,
                              t.digits + at * kStep, kStep, count, sums);
    }
    for (int64_t i = 0; i < Rows; ++i) {
      add_rests(t.block, t.row[i], end * qfuse::kGroup, done[i], rests + i * qfuse::kBlock);
    }
  }
}

// Half of the lanes, twice as wide.
using HalfInts = int32_t __attribute__((vector_size(2 * kLanes)));
using HalfFloats = float __attribute__((vector_size(2 * kLanes)));
using Longs = int64_t __attribute__((vector_size(4 * kLanes)));
using Doubles = double __attribute__((vector_size(4 * kLanes)));

// Sums of a row from those of its digits, exact until they become floats.
template <int Digits>
void finish_digits(const qfuse::RealBlock& b, const qfuse::DigitRow& row, const int32_t* totals,
                   const float* rests, float* sums) {
  const auto unit = bits<double>(static_cast<int64_t>(1023 + row.exponent) << 52);
  for (int64_t column = 0; column < qfuse::kBlock; column += kLanes / 2) {
    Longs sum = {};
    Unrolled<Digits>::run([&]<int I>() QFUSE_LAMBDA {
      HalfInts part;
      __builtin_memcpy(&part, totals + I * qfuse::kBlock + column, sizeof(part));
      sum += __builtin_convertvector(part, Longs) << (8 * I);
    });
    Longs zero = Longs{} + 128;  // of the unsigned bytes
    for (int64_t i = 0; b.zero && i < kLanes / 2; ++i) zero[i] += b.zero[column + i];
    sum -= zero * row.sum;
    HalfFloats rest;
    __builtin_memcpy(&rest, rests + column, sizeof(rest));
    const Doubles exact = __builtin_convertvector(sum, Doubles) * unit;
    const auto rounded =
        __builtin_convertvector(exact + __builtin_convertvector(rest, Doubles), HalfFloats);
    __builtin_memcpy(sums + column, &rounded, sizeof(rounded));
  }
}

template <int Rows, int Digits>
void multiply_digit_rows(const qfuse::DigitTile& t, float* sums) {
  alignas(64) int32_t totals[Rows * Digits * qfuse::kBlock];
  alignas(64) float rests[Rows * qfuse::kBlock];
  digit_sums<Rows, Digits>(t, totals, rests);
  for (int64_t i = 0; i < Rows; ++i) {
    if (t.row[i].digits == 0) continue;
    finish_digits<Digits>(t.block, t.row[i], totals + i * Digits * qfuse::kBlock,
                          rests + i * qfuse::kBlock, sums + i * qfuse::kBlock);
  }
}

template <int Rows>
void multiply_digit_counts(const qfuse::DigitTile& t, float* sums) {
  if (t.count == 2) return multiply_digit_rows<Rows, 2>(t, sums);
  if (t.count == 3) return multiply_digit_rows<Rows, 3>(t, sums);
  if constexpr (Rows <= qfuse::kFourDigitRows) multiply_digit_rows<Rows, 4>(t, sums);
}

void multiply_digits(const qfuse::DigitTile& t, float* sums) {
  switch (t.rows) {
    case 1:
      return multiply_digit_counts<1>(t, sums);
    case 2:
      return multiply_digit_counts<2>(t, sums);
    case 3:
      return multiply_digit_counts<3>(t, sums);
    default:
      return multiply_digit_counts<4>(t, sums);
  }
}

}  // namespace
