// Groupwise weights along K, for any instruction set: 4-bit values to bytes, and integer sums of a
// group to float totals. See Groups.
#pragma once

#include "isa/fetch.h"
#include "isa/vec.h"

namespace {

constexpr int64_t kColumnVectors = qfuse::kBlock / kLanes;

// Which zero points are present besides a single weight zero point; known before the loops.
template <bool X, bool W>
struct Zeros {
  static constexpr bool kX = X;
  static constexpr bool kW = W;
};

// Calls f with the Zeros of a tile.
template <class F>
QFUSE_INLINE void with_zeros(const qfuse::Groups& g, const F& f) {
  if (g.w_zero) return g.x_zero ? f(Zeros<true, true>{}) : f(Zeros<false, true>{});
  return g.x_zero ? f(Zeros<true, false>{}) : f(Zeros<false, false>{});
}

// Calls f<Rows, Has>() with the rows of a tile, at most Most, as a constant, and its Zeros.
template <int Most, class F>
QFUSE_INLINE void with_tile(const qfuse::GroupTile& t, const F& f) {
  if constexpr (Most > 1) {
    if (t.rows < Most) return with_tile<Most - 1>(t, f);
  }
  with_zeros(t.groups, [&]<class Has>(Has) { f.template operator()<Most, Has>(); });
}

// Calls f<Rows, Has>(tile, totals) for pieces of at most Most rows of a tile of any height.
template <int Most, class F>
QFUSE_INLINE void in_tiles(const qfuse::GroupTile& all, float* totals, const F& f) {
  qfuse::GroupTile t = all;
  const auto moved = [](const int32_t* from, int64_t by) { return from ? from + by : nullptr; };
  for (int64_t i = 0; i < all.rows; i += Most) {
    t.a = all.a + i * all.lda;
    t.rows = all.rows - i < Most ? all.rows - i : Most;
    t.groups.x_zero = moved(all.groups.x_zero, i);
    t.groups.x_terms = moved(all.groups.x_terms, i * all.groups.count);
    with_tile<Most>(t, [&]<int Rows, class Has>() {
      f.template operator()<Rows, Has>(t, totals + i * qfuse::kBlock);
    });
  }
}

QFUSE_INLINE Ints w_sums(const qfuse::Groups& g, int64_t at) {
  if (!g.short_sums) return load<Ints>(g.long_sums + at, kLanes);
  return widened(load<Numbers>(g.short_sums + at, kLanes));
}

// The parameters of one vector of features in one group.
template <class Has>
struct GroupColumn {
  QFUSE_INLINE GroupColumn(const qfuse::Groups& g, int64_t group, int64_t vector) {
    const int64_t at = group * qfuse::kBlock + vector * kLanes;
    scale = load<Floats>(g.scale + at, kLanes);
    if constexpr (Has::kX) sums = bits<Words>(w_sums(g, at));
    if constexpr (Has::kW) {
      zero = bits<Words>(widened(load<Bytes>(g.w_zero + at, kLanes)));
    }
  }

  // The contribution of a group to the total of a row, from sums that started at `start_of`.
  QFUSE_INLINE Floats share(const qfuse::Groups& g, Words sum, int64_t group, int64_t row) const {
    if constexpr (Has::kW) sum += zero * static_cast<uint32_t>(g.x_terms[row * g.count + group]);
    if constexpr (Has::kX) sum -= sums * static_cast<uint32_t>(g.x_zero[row]);
    return __builtin_convertvector(bits<Ints>(sum), Floats) * scale;
  }

  Floats scale;
  Words sums;
  Words zero;
};

// Fetches the parameters of a later group.
template <class Has>
QFUSE_INLINE void fetch_columns(const qfuse::Groups& g, int64_t group) {
  const int64_t at = group * qfuse::kBlock;
  fetch_parameters(g.scale + at);
  if constexpr (Has::kX) {
    if (g.short_sums) {
      fetch_parameters(g.short_sums + at);
    } else {
      fetch_parameters(g.long_sums + at);
    }
  }
  if constexpr (Has::kW) fetch_parameters(g.w_zero + at);
}

// Adds the contribution of a group, with sums of the vectors from `first` on, to all rows.
template <int Rows, int Vectors, class Has>
QFUSE_INLINE void add_shares(const qfuse::Groups& g, int64_t group, int64_t first,
                             const Words* sums, float* totals) {
  // Compilers would keep totals in registers for the next group, which spills.
  asm volatile("" : : : "memory");
  Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
    const GroupColumn<Has> column(g, group, first + V);
    Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
      float* to = totals + R * qfuse::kBlock + (first + V) * kLanes;
      const Floats share = column.share(g, sums[R * Vectors + V], group, R);
      store(to, load<Floats>(to, kLanes) + share, kLanes);
    });
  });
}

// The initial value of a row's sums: the whole correction for a single weight zero point.
template <class Has>
QFUSE_INLINE Words start_of(const qfuse::Groups& g, int64_t group, int64_t row) {
  if (Has::kW || !g.x_terms) return Words{};
  return Words{} + static_cast<uint32_t>(g.x_terms[row * g.count + group]);
}

// Adds the contribution of a group whose integer sums are in `sums`.
void add_group(const qfuse::Groups& g, int64_t group, const int32_t* sums, int64_t rows,
               float* totals) {
  with_zeros(g, [&]<class Has>(Has) {
    for (int64_t v = 0; v < kColumnVectors; ++v) {
      const GroupColumn<Has> column(g, group, v);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = i * qfuse::kBlock + v * kLanes;
        const Words sum = bits<Words>(load<Ints>(sums + at, kLanes)) + start_of<Has>(g, group, i);
        const Floats total = load<Floats>(totals + at, kLanes);
        store(totals + at, total + column.share(g, sum, group, i), kLanes);
      }
    }
  });
}

// Low nibbles are one group of four k, high nibbles the next one.
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
