// Parts of groups of 4-bit weights whose products with digits are added as integers.
#pragma once

#include "isa/vec.h"
#include "digits/digit_rows.h"

namespace {

// Calls f(segment, group, k, count) with every segment of `count` input features from `k` on.
template <class F>
QFUSE_INLINE void in_segments(int64_t depth, int64_t size, const F& f) {
  int64_t segment = 0;
  for (int64_t group = 0, k = 0; k < depth; ++group) {
    for (const int64_t end = k + size; k < end; ++segment) {
      const int64_t count = end - k < qfuse::kSegment ? end - k : qfuse::kSegment;
      f(segment, group, k, count);
      k += count;
    }
  }
}

}  // namespace
