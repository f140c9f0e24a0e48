// Weights in groups along K, for any instruction set: codes of four bits to bytes, and integer sums
// of a group to float totals. See Groups.
#pragma once

#include "vec.h"

namespace {

constexpr int64_t kColumnVectors = qfuse::kBlock / kLanes;

// What one vector of features has in one group.
struct GroupColumn {
  GroupColumn(const qfuse::Groups& g, int64_t group, int64_t vector) {
    const int64_t at = group * qfuse::kBlock + vector * kLanes;
    scale = load<Floats>(g.scale + at, kLanes);
    if (g.x_zero) sums = bits<Words>(load<Ints>(g.w_sums + at, kLanes));
    if (g.w_zero) {
      const Bytes zeros = load<Bytes>(g.w_zero + at, kLanes);
      zero = bits<Words>(__builtin_convertvector(zeros, Ints));
    }
  }

  Floats scale = {};
  Words sums = {};
  Words zero = {};
};

// What the sums of a row start from: all that one zero point of all weights asks for.
QFUSE_INLINE int32_t start_of(const qfuse::Groups& g, int64_t group, int64_t row) {
  return g.x_terms && !g.w_zero ? g.x_terms[row * g.count + group] : 0;
}

// The share of a group in the total of a row, from sums that began with `start_of`.
QFUSE_INLINE Floats share(const qfuse::Groups& g, const GroupColumn& column, Words sum,
                          int64_t group, int64_t row) {
  if (g.w_zero) sum += column.zero * static_cast<uint32_t>(g.x_terms[row * g.count + group]);
  if (g.x_zero) sum -= column.sums * static_cast<uint32_t>(g.x_zero[row]);
  return __builtin_convertvector(bits<Ints>(sum), Floats) * column.scale;
}

// Adds the shares of a group whose products are in `sums`.
void add_group(const qfuse::Groups& g, int64_t group, const int32_t* sums, int64_t rows,
               float* totals) {
  for (int64_t v = 0; v < kColumnVectors; ++v) {
    const GroupColumn column(g, group, v);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = i * qfuse::kBlock + v * kLanes;
      const Words start = Words{} + static_cast<uint32_t>(start_of(g, group, i));
      const Words sum = bits<Words>(load<Ints>(sums + at, kLanes)) + start;
      store(totals + at, load<Floats>(totals + at, kLanes) + share(g, column, sum, group, i),
            kLanes);
    }
  }
}

// Low halves are one group of four k, high halves the next one.
void unpack(const uint8_t* codes, int64_t pairs, uint8_t* panel) {
  constexpr int64_t kBytes = qfuse::kBlock * qfuse::kGroup;
  for (int64_t p = 0; p < pairs; ++p, codes += kBytes, panel += 2 * kBytes) {
    for (int64_t i = 0; i < kBytes; i += 4 * kLanes) {
      Words both;
      __builtin_memcpy(&both, codes + i, sizeof(both));
      const Words low = both & 0x0f0f0f0fu;
      const Words high = (both >> 4) & 0x0f0f0f0fu;
      __builtin_memcpy(panel + i, &low, sizeof(low));
      __builtin_memcpy(panel + kBytes + i, &high, sizeof(high));
    }
  }
}

}  // namespace
