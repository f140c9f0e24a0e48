// Float rows as fixed-point numbers of 8-bit digits, which integer instructions multiply.
#pragma once

#include "kernel_api.h"

namespace qfuse {

constexpr int64_t kMostDigits = 4;
// Rows that may have so many; for more of them a float loop is as fast.
constexpr int64_t kFourDigitRows = 2;
// Input features of such a product: sums of unsigned bytes times signed digits fit int32.
constexpr int64_t kMostDigitDepth = int64_t{1} << 16;
constexpr int64_t kDigitBytes = kMostDigits * kGroup;  // of a row in a group of four k
// Input features of 4-bit weights whose products are added as integers: 8 KiB of a block, so that
// rests among them are added from the L1 cache.
constexpr int64_t kSegment = 256;

// What a number leaves out of the value at input feature `k`, exactly.
struct Rest {
  int32_t k;
  float value;
};

// A row is the sum of number[k] * 2^exponent and its rests, but for less than 2^-24 of each value. A
// number is the sum of digit[i] * 256^i, with signed digits.
struct DigitRow {
  int64_t digits = 0;  // 0: the row is not multiplied this way
  int exponent = 0;
  int64_t sum = 0;  // of all numbers
  int64_t rests = 0;
  Rest* rest = nullptr;
};

// One rest in this many values takes less time than another digit, one in half as many less than the
// float loop.
constexpr int64_t kRestShare = 16;

constexpr int64_t most_rests(int64_t columns) { return columns / (kRestShare / 2); }

// Where the digits of a row are written: [groups of four k][kMostDigits][4], `step` bytes from one
// group to the next, with whole vectors of 16 k.
struct DigitPlace {
  int8_t* digits;
  int64_t step;
  Rest* rest;  // room for `most_rests`
};

// Rows times one block of weights.
struct DigitTile {
  RealBlock block;
  const int8_t* digits;  // [groups of four k][rows][kMostDigits][4]
  int64_t rows;
  int64_t count;        // digits that are multiplied: the most of any row
  const DigitRow* row;  // those without digits are left out
};

// One row times one block of 4-bit weights, which are multiplied in segments: groups, or parts of at
// most `kSegment` input features of longer ones.
struct FourBitTile : DigitTile {
  const int32_t* sums;  // [segments][2], see `sum_segments`
};

struct DigitKernels {
  // Writes a row with at most `most` digits, fewer for narrower types.
  DigitRow (*split)(const void* x, Real type, int64_t columns, int64_t most, const DigitPlace& to);
  // sums[i * 64 + j] of each row with digits; rounded once, except for the rests.
  void (*multiply)(const DigitTile& tile, float* sums);
  // Sums of a row's digits over each segment, [segments][2]: those of digit[0] + 256 * digit[1], and
  // of digit[2] + 256 * digit[3].
  void (*sum_segments)(const int8_t* digits, int64_t depth, int64_t group, int32_t* sums);
  // sums[j] of one row; those of every segment are rounded.
  void (*multiply_four_bits)(const FourBitTile& tile, float* sums);
};

}  // namespace qfuse
