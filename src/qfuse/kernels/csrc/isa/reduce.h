// Reductions of 64 columns to one number, in an order that does not depend on the number of lanes.
#pragma once

#include "isa/vec.h"

namespace {

// The first `count` lanes of x, and `rest` in the others.
QFUSE_INLINE Floats first_of(Floats x, int64_t count, float rest) {
  if (count >= kLanes) return x;
  Ints lane = {};
  for (int32_t i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(count > 0 ? count : 0) ? x : broadcast(rest);
}

struct Greater {
  template <class Value>
  QFUSE_INLINE Value operator()(Value a, Value b) const {
    return a > b ? a : b;
  }
};

struct Lesser {
  template <class Value>
  QFUSE_INLINE Value operator()(Value a, Value b) const {
    return a < b ? a : b;
  }
};

struct Sum {
  template <class Value>
  QFUSE_INLINE Value operator()(Value a, Value b) const {
    return a + b;
  }
};

template <int Lanes>
struct Part {
  typedef float Vector __attribute__((vector_size(4 * Lanes)));
};

template <int Lanes, class F, class Vector>
QFUSE_INLINE float folded(Vector x, const F& f) {
  if constexpr (Lanes == 2) {
    return f(x[0], x[1]);
  } else {
    struct Both {
      typename Part<Lanes / 2>::Vector low;
      typename Part<Lanes / 2>::Vector high;
    };
    const auto both = bits<Both>(x);
    return folded<Lanes / 2>(f(both.low, both.high), f);
  }
}

// All lanes of `Vectors` vectors by `f`: halves with halves.
template <int Vectors, class F>
QFUSE_INLINE float reduced(Floats* parts, const F& f) {
  if constexpr (Vectors == 1) {
    return folded<static_cast<int>(kLanes)>(parts[0], f);
  } else {
    Unrolled<Vectors / 2>::run(
        [&]<int I>() QFUSE_LAMBDA { parts[I] = f(parts[I], parts[I + Vectors / 2]); });
    return reduced<Vectors / 2>(parts, f);
  }
}

}  // namespace
