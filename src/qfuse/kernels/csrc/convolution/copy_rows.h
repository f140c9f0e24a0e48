// Rows of the patch matrix for any instruction set. See PatchRows.
#pragma once

#include "isa/vec.h"

namespace {

template <int Size, int Chunks>
void copy_chunks(const qfuse::PatchRows& p) {
  for (int64_t i = 0; i < p.rows; ++i) {
    uint8_t* to = p.to + i * p.ld;
    for (int64_t r = 0; r < p.runs; ++r, to += p.bytes) {
      const uint8_t* from = p.from[r] + i * p.step[r];
      Unrolled<Chunks>::run([&]<int C>() QFUSE_LAMBDA {
        __builtin_memcpy(to + C * Size, from + C * Size, Size);
      });
    }
  }
}

void copy_rows(const qfuse::PatchRows& p) {
  constexpr int kWide = 4 * kLanes;
  if (p.bytes <= 16) return copy_chunks<16, 1>(p);
  if (p.bytes <= 32) return copy_chunks<kWide < 32 ? 16 : 32, kWide < 32 ? 2 : 1>(p);
  switch ((p.bytes + 63) / 64) {
    case 1:
      return copy_chunks<kWide, 64 / kWide>(p);
    case 2:
      return copy_chunks<kWide, 128 / kWide>(p);
    case 3:
      return copy_chunks<kWide, 192 / kWide>(p);
    case 4:
      return copy_chunks<kWide, 256 / kWide>(p);
    case 5:
      return copy_chunks<kWide, 320 / kWide>(p);
    default:
      return copy_chunks<kWide, qfuse::kLongestRun / kWide>(p);
  }
}

}  // namespace
