// Blocks of 8-bit weights times rows of digits with `vpdpbusd`: a digit costs one instruction per
// vector of weights, which need no conversion. Weights with flipped sign bits are the unsigned
// operand, digits the signed one, which the instruction broadcasts from memory.
#pragma once

#include <immintrin.h>

#include "isa/vec.h"
#include "linear/split_digits.h"

namespace {

constexpr int kDigitVectors = qfuse::kBlock / kLanes;
constexpr int kDigitTotals = 6;       // digits whose sums of a block fit into the registers
// Groups of four k that are read again from the L1 cache for more digits. With a page at a time the
// processor goes on prefetching; with longer slices memory waits while a slice is read again.
constexpr int64_t kDigitSlice = 16;

// sum += dot products of four u8 with four s8.
QFUSE_INLINE void digit_dot(__m512i& sum, __m512i weights, const int8_t* digits) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(sum)
      : "v"(weights), "m"(*reinterpret_cast<const int32_t*>(digits)));
}

// Adds the products of some groups of four k to [Rows][Digits][64] sums.
template <int Rows, int Digits>
QFUSE_INLINE void add_digits(const uint8_t* w, const int8_t* x, int64_t step, int64_t groups,
                             int32_t* sums) {
  constexpr int kTotals = Rows * Digits * kDigitVectors;
  __m512i flip = _mm512_set1_epi8(-128);
  asm("" : "+v"(flip));  // one register, not one for each use
  __m512i total[kTotals];
  Unrolled<kTotals>::run(
      [&]<int I>() QFUSE_LAMBDA { total[I] = _mm512_load_si512(sums + I * kLanes); });
  for (int64_t g = 0; g < groups; ++g, w += qfuse::kBlock * qfuse::kGroup, x += step) {
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

template <int Rows, int Digits>
void digit_sums(const qfuse::DigitTile& t, int32_t* sums) {
  constexpr int64_t kStep = Rows * qfuse::kDigitBytes;
  const int64_t groups = t.block.depth / qfuse::kGroup;
  const int64_t slice = Rows * Digits <= kDigitTotals ? groups : kDigitSlice;
  __builtin_memset(sums, 0, Rows * Digits * qfuse::kBlock * sizeof(int32_t));
  for (int64_t g = 0; g < groups; g += slice) {
    const int64_t count = groups - g < slice ? groups - g : slice;
    add_slice<Rows, Digits>(t.block.codes + g * qfuse::kBlock * qfuse::kGroup, t.digits + g * kStep,
                            kStep, count, sums);
  }
}

// The products of the rests of a row with the weights.
QFUSE_INLINE void add_rests(const qfuse::RealBlock& b, const qfuse::DigitRow& row, float* sums) {
  Floats total[kDigitVectors] = {};
  Floats zero[kDigitVectors] = {};
  Unrolled<kDigitVectors>::run([&]<int V>() QFUSE_LAMBDA {
    if (!b.zero) return;
    zero[V] = __builtin_convertvector(widened(load<Bytes>(b.zero + V * kLanes, kLanes)), Floats);
  });
  for (int64_t i = 0; i < row.rests; ++i) {
    const qfuse::Rest rest = row.rest[i];
    const uint8_t* from = b.codes + rest.k / qfuse::kGroup * qfuse::kBlock * qfuse::kGroup;
    const int shift = 24 - 8 * static_cast<int>(rest.k % qfuse::kGroup);
    Unrolled<kDigitVectors>::run([&]<int V>() QFUSE_LAMBDA {
      Ints words;
      __builtin_memcpy(&words, from + 64 * V, sizeof(words));
      const Floats code = __builtin_convertvector((words << shift) >> 24, Floats);
      total[V] = fused(code - zero[V], broadcast(rest.value), total[V]);
    });
  }
  Unrolled<kDigitVectors>::run(
      [&]<int V>() QFUSE_LAMBDA { store(sums + V * kLanes, total[V], kLanes); });
}

// Half of the lanes, twice as wide.
using HalfInts = int32_t __attribute__((vector_size(2 * kLanes)));
using HalfFloats = float __attribute__((vector_size(2 * kLanes)));
using Longs = int64_t __attribute__((vector_size(4 * kLanes)));
using Doubles = double __attribute__((vector_size(4 * kLanes)));

// Sums of a row from those of its digits, exact until they become floats.
template <int Digits>
void finish_digits(const qfuse::RealBlock& b, const qfuse::DigitRow& row, const int32_t* totals,
                   float* sums) {
  alignas(64) float rests[qfuse::kBlock];
  add_rests(b, row, rests);
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
  digit_sums<Rows, Digits>(t, totals);
  for (int64_t i = 0; i < Rows; ++i) {
    if (t.row[i].digits == 0) continue;
    finish_digits<Digits>(t.block, t.row[i], totals + i * Digits * qfuse::kBlock,
                          sums + i * qfuse::kBlock);
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

constexpr qfuse::DigitKernels digit_kernels{&split_row, &multiply_digits};

}  // namespace
