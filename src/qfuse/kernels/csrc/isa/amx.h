// AMX: sums of 32 rows by 32 columns, or of up to 16 rows by 64, in four tile registers over all of
// K. The rows of a tile of weights are 16 groups of four k of 16 columns, as they are packed. Sums
// are finished 32 rows at a time, from the L1 cache. What needs no tiles is that of avx512_vnni.cpp.
//
// Included with the tiles of the processor, or with emulated ones. Linux lets a process use tiles
// that asks for them, see select.cpp.
#pragma once

#include <algorithm>
#include <cstring>

#include "isa/fetch.h"
#include "isa/vec.h"

namespace {

constexpr int64_t kPieceRows = 2 * kTileRows;
constexpr int64_t kBlockBytes = qfuse::kBlock * 4;  // from a group of four bytes to the next
// Rows that stay in the L2 cache, of which they take half, while blocks of weights pass through it;
// and so many at most, since each adds a page to those that a block of results is written to.
constexpr int64_t kStripBytes = 1 << 20;
constexpr int64_t kStripRows = 256;

// Lines of the weights behind a tile that are fetched with each step along K.
constexpr int kFetched = 8;

// The path that this one begins with.
const qfuse::Path* base = nullptr;

// Registers: 0 to 3 for sums, 4 and 5 for rows of A, 6 and 7 for B.
struct Shapes {
  int64_t upper;  // rows of A in 4, and of the sums 0 and 1
  int64_t lower;  // rows of A in 5, and of the sums 2 and 3
  int64_t bytes;  // of a row of A in a step along K
  bool operator==(const Shapes&) const = default;
};

thread_local Shapes current{};  // all zero if there are none

void set_shapes(const Shapes& wanted) {
  if (current == wanted) return;
  const auto [upper, lower, bytes] = wanted;
  const int64_t rows[kTiles] = {upper, upper, lower, lower, upper, lower, bytes / 4, bytes / 4};
  TileShapes shapes;
  for (int i = 0; i < kTiles; ++i) {
    shapes.rows[i] = static_cast<uint8_t>(rows[i]);
    shapes.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? bytes : kTileBytes);
  }
  load_shapes(shapes);
  current = wanted;
}

void release() {
  if (current == Shapes{}) return;
  release_tiles();
  current = {};
}

// What remains of K after whole steps, filled up with zeros.
struct Rest {
  alignas(64) uint8_t a[kPieceRows][kTileBytes];
  alignas(64) int8_t b[kTileRows][kBlockBytes];
};

// Rows of so many bytes, a multiple of four, times a block of columns. They are multiplied in equal
// steps, if there are some, or in whole tiles and a rest.
struct Product {
  Product(const void* rows, int64_t ld, const void* columns, int64_t bytes, bool adds,
          qfuse::Following* next = nullptr)
      : a(static_cast<const uint8_t*>(rows)),
        lda(ld),
        b(static_cast<const int8_t*>(columns)),
        add(adds),
        following(next) {
    const int64_t least = (bytes + kTileBytes - 1) / kTileBytes;
    const bool equal = bytes > 0 && bytes / 4 % least == 0;
    steps = equal ? least : bytes / kTileBytes;
    step = equal ? bytes / least : kTileBytes;
    rest = bytes - steps * step;
  }

  const uint8_t* a;
  int64_t lda;  // in bytes
  const int8_t* b;
  bool add;  // to the sums
  qfuse::Following* following;
  int64_t steps;
  int64_t step;  // bytes
  int64_t rest;
};

void copy_rest_of_b(const Product& p, Rest& rest) {
  if (p.rest == 0) return;
  const int64_t used = p.rest / 4 * kBlockBytes;
  std::memcpy(rest.b, p.b + p.steps * p.step / 4 * kBlockBytes, used);
  std::memset(&rest.b[0][0] + used, 0, sizeof(rest.b) - used);
}

void copy_rest_of_a(const Product& p, int64_t rows, Rest& rest) {
  if (p.rest == 0) return;
  const uint8_t* from = p.a + p.steps * p.step;
  const __mmask64 used = (uint64_t{1} << p.rest) - 1;
  for (int64_t i = 0; i < rows; ++i) {
    _mm512_store_si512(rest.a[i], _mm512_maskz_loadu_epi8(used, from + i * p.lda));
  }
}

// Calls step(a, distance of its rows, b) along K.
template <class F>
QFUSE_INLINE void each_step(const Product& p, const Rest& rest, int64_t column, const F& step) {
  const uint8_t* a = p.a;
  const int8_t* b = p.b + column * 4;
  const int64_t distance = p.step / 4 * kBlockBytes;
  Fetcher fetcher(p.following);
  for (int64_t i = 0; i < p.steps; ++i, a += p.step, b += distance) {
    step(a, p.lda, b);
    Unrolled<kFetched>::run([&]<int>() QFUSE_LAMBDA { fetcher.step(); });
  }
  if (p.rest > 0) step(&rest.a[0][0], int64_t{kTileBytes}, &rest.b[0][0] + column * 4);
}

template <int T>
QFUSE_INLINE void begin_sums(const Product& p, const void* sums) {
  if (p.add) {
    load_tile<T>(sums, kBlockBytes);
  } else {
    clear_tile<T>();
  }
}

// Up to 16 rows by Columns tiles.
template <class Dot, int Columns>
void multiply_low(const Product& p, const Rest& rest, int32_t* sums) {
  Unrolled<Columns>::run([&]<int C>() QFUSE_LAMBDA { begin_sums<C>(p, sums + C * kTileRows); });
  each_step(p, rest, 0, [&](const uint8_t* a, int64_t lda, const int8_t* b) QFUSE_LAMBDA {
    load_tile<4>(a, lda);
    Unrolled<Columns>::run([&]<int C>() QFUSE_LAMBDA {
      load_tile<6 + C % 2>(b + C * kTileBytes, kBlockBytes);
      Dot::template add<C, 4, 6 + C % 2>();
    });
  });
  Unrolled<Columns>::run([&]<int C>() QFUSE_LAMBDA {
    store_tile<C>(sums + C * kTileRows, kBlockBytes);
  });
}

// 17 to 32 rows by Columns tiles, one or two, from `column` on.
template <class Dot, int Columns>
void multiply_high(const Product& p, const Rest& rest, int64_t column, int32_t* sums) {
  int32_t* upper = sums + column;
  int32_t* lower = upper + kTileRows * qfuse::kBlock;
  Unrolled<Columns>::run([&]<int C>() QFUSE_LAMBDA {
    begin_sums<C>(p, upper + C * kTileRows);
    begin_sums<2 + C>(p, lower + C * kTileRows);
  });
  each_step(p, rest, column, [&](const uint8_t* a, int64_t lda, const int8_t* b) QFUSE_LAMBDA {
    load_tile<4>(a, lda);
    Unrolled<Columns>::run([&]<int C>() QFUSE_LAMBDA {
      load_tile<6 + C>(b + C * kTileBytes, kBlockBytes);
      Dot::template add<C, 4, 6 + C>();
    });
    load_tile<5>(a + kTileRows * lda, lda);
    Unrolled<Columns>::run([&]<int C>() QFUSE_LAMBDA { Dot::template add<2 + C, 5, 6 + C>(); });
  });
  Unrolled<Columns>::run([&]<int C>() QFUSE_LAMBDA {
    store_tile<C>(upper + C * kTileRows, kBlockBytes);
    store_tile<2 + C>(lower + C * kTileRows, kBlockBytes);
  });
}

// Up to kPieceRows rows by `columns` columns.
template <class Dot>
void multiply_piece(const Product& p, int64_t rows, int64_t columns, Rest& rest, int32_t* sums) {
  copy_rest_of_a(p, rows, rest);
  const int64_t tiles = (columns + kTileRows - 1) / kTileRows;
  if (rows <= kTileRows) {
    set_shapes({rows, rows, p.step});
    if (tiles > 2) return multiply_low<Dot, 4>(p, rest, sums);
    return tiles > 1 ? multiply_low<Dot, 2>(p, rest, sums) : multiply_low<Dot, 1>(p, rest, sums);
  }
  set_shapes({kTileRows, rows - kTileRows, p.step});
  for (int64_t i = 0; i < tiles; i += 2) {
    const int64_t column = i * kTileRows;
    if (i + 1 < tiles) {
      multiply_high<Dot, 2>(p, rest, column, sums);
    } else {
      multiply_high<Dot, 1>(p, rest, column, sums);
    }
  }
}

// Calls take(row, rows) when the sums of up to kPieceRows rows from a row on are at `sums(row)`.
template <class Dot, class Sums, class Take>
void multiply_rows(Product p, int64_t rows, int64_t columns, const Sums& sums, const Take& take) {
  Rest rest;
  copy_rest_of_b(p, rest);
  for (int64_t i = 0; i < rows; i += kPieceRows, p.a += kPieceRows * p.lda) {
    const int64_t count = std::min(kPieceRows, rows - i);
    multiply_piece<Dot>(p, count, columns, rest, sums(i));
    take(i, count);
  }
}

Product product_of(const qfuse::Tile& t) {
  return {t.a, t.lda, t.b, t.groups * qfuse::kGroup, false};
}

void multiply(const qfuse::Tile& t, int32_t* sums) {
  const auto at = [&](int64_t row) { return sums + row * qfuse::kBlock; };
  const auto none = [](int64_t, int64_t) {};
  if (t.flip) return multiply_rows<SignedDot>(product_of(t), t.rows, t.columns, at, none);
  multiply_rows<UnsignedDot>(product_of(t), t.rows, t.columns, at, none);
}

// See Path::multiply_finished: this path takes every epilogue.
bool multiply_finished(const qfuse::Tile& t, const qfuse::Epilogue& e, int64_t row,
                       int64_t column) {
  alignas(64) int32_t sums[kPieceRows * qfuse::kBlock];
  const auto at = [&](int64_t) { return sums; };
  const auto finish = [&](int64_t i, int64_t rows) {
    base->finish(e, sums, row + i, rows, column, t.columns);
  };
  if (t.flip) {
    multiply_rows<SignedDot>(product_of(t), t.rows, t.columns, at, finish);
  } else {
    multiply_rows<UnsignedDot>(product_of(t), t.rows, t.columns, at, finish);
  }
  return true;
}

// Totals stay in the L1 cache while all groups are added to them.
template <class Dot>
void add_groups(const qfuse::GroupTile& t, int64_t first, int64_t last, float* totals) {
  alignas(64) int32_t sums[kPieceRows * qfuse::kBlock];
  const int64_t bytes = t.depth * qfuse::kGroup;
  const auto moved = [](const int32_t* from, int64_t by) { return from ? from + by : nullptr; };
  for (int64_t i = 0; i < t.rows; i += kPieceRows) {
    const int64_t rows = std::min(kPieceRows, t.rows - i);
    qfuse::Groups groups = t.groups;
    groups.x_zero = moved(groups.x_zero, i);
    groups.x_terms = moved(groups.x_terms, i * groups.count);
    for (int64_t g = first; g < last; ++g) {
      const uint8_t* b = t.b + (g - first) * bytes * qfuse::kBlock;
      multiply_rows<Dot>({t.a + i * t.lda + g * bytes, t.lda, b, bytes, false}, rows, qfuse::kBlock,
                         [&](int64_t) { return sums; }, [](int64_t, int64_t) {});
      base->groups->add(groups, g, sums, rows, totals + i * qfuse::kBlock);
    }
  }
}

// See GroupKernels.
void multiply_panel(const qfuse::GroupTile& t, int64_t first, int64_t last, float* totals) {
  const auto add = t.is_signed ? &add_groups<SignedDot> : &add_groups<UnsignedDot>;
  add(t, first, last, totals);
}

void multiply_bytes(const qfuse::GroupTile& t, float* totals) {
  multiply_panel(t, 0, t.groups.count, totals);
}

void multiply_real(const qfuse::RealTile& t, qfuse::Real type, float* sums) {
  if (type != qfuse::Real::bf16) return base->real->multiply(t, type, sums);
  const Product p(t.a, t.lda * 2, t.panel, t.groups * qfuse::kGroup * 2, t.add, t.following);
  auto* words = reinterpret_cast<int32_t*>(sums);
  multiply_rows<RealDot>(
      p, t.rows, t.columns, [&](int64_t row) { return words + row * qfuse::kBlock; },
      [](int64_t, int64_t) {});
}

int64_t tile_rows(int64_t) { return kPieceRows; }

int64_t most_strip_rows(int64_t bytes) {
  return std::min(kStripBytes / std::max<int64_t>(bytes, 1), kStripRows);
}

qfuse::Path path_with_tiles(const qfuse::Path& other, const char* name) {
  base = &other;
  static qfuse::RealKernels real;
  real = *other.real;
  real.multiply = &multiply_real;
  static qfuse::GroupKernels groups;
  groups = *other.groups;
  groups.bytes = &multiply_bytes;
  groups.panel = &multiply_panel;
  groups.code_rows = kTileRows;
  groups.byte_rows = INT64_MAX;
  qfuse::Path path = other;
  path.name = name;
  path.flips_slowly = false;
  path.tile_rows = &tile_rows;
  path.keeps_sign = true;
  path.most_strip_rows = &most_strip_rows;
  path.multiply = &multiply;
  path.multiply_finished = &multiply_finished;
  path.release = &release;
  path.real = &real;
  path.groups = &groups;
  return path;
}

}  // namespace
