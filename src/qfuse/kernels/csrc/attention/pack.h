// Operands and results of attention, for any instruction set. See AttentionKernels.
#pragma once

#include <type_traits>

#include "isa/vec.h"

namespace {

using qfuse::OperandRows;
using qfuse::Real;

template <Real Type>
using ElementOf = std::conditional_t<Type == Real::f32, float, uint16_t>;

template <class Element>
QFUSE_INLINE const Element* element_at(const OperandRows& x, int64_t row, int64_t feature) {
  return static_cast<const Element*>(x.data) + row * x.row_stride + feature * x.feature_stride;
}

// `from` if its elements are adjacent, else a copy of `count` of them in `space`.
template <class Element>
QFUSE_INLINE const Element* adjacent(const Element* from, int64_t distance, int64_t count,
                                     Element* space) {
  if (distance == 1) return from;
  for (int64_t i = 0; i < count; ++i) space[i] = from[i * distance];
  return space;
}

// Whether `rows` rows have `features` adjacent features from there on.
QFUSE_INLINE bool is_whole(const OperandRows& x, int64_t row, int64_t rows, int64_t feature,
                           int64_t features) {
  return x.feature_stride == 1 && row + rows <= x.rows && feature + features <= x.features;
}

// kLanes words of a row from a feature on, each a float32 or a pair of bfloat16; zero behind the
// last row and feature, unless they are `Whole`.
template <Real Given, Real Product, bool Whole = false>
QFUSE_INLINE Words words_at(const OperandRows& x, int64_t row, int64_t feature) {
  constexpr int64_t kSize = kLanes * qfuse::pair_of(Product);
  const int64_t rest = Whole ? kSize : row < x.rows ? x.features - feature : 0;
  if (rest <= 0) return Words{};
  const int64_t count = rest < kSize ? rest : kSize;
  ElementOf<Given> space[kSize];
  const auto* from = element_at<ElementOf<Given>>(x, row, feature);
  if (!Whole) from = adjacent(from, x.feature_stride, count, space);
  if constexpr (Product == Real::f32) {
    return bits<Words>(load_real(from, Given, 0, count));
  } else {
    Words words{};
    if (count == kSize) {
      __builtin_memcpy(&words, from, sizeof(words));
    } else {
      __builtin_memcpy(&words, from, count * sizeof(*from));
    }
    return words;
  }
}

// One step of a transposition: blocks of `Step` lanes of a and b change places.
template <int Step>
QFUSE_INLINE void exchange(Words& a, Words& b) {
#if defined(__AVX512F__)
  struct Order {
    constexpr Order() {
      for (uint32_t i = 0; i < kLanes; ++i) {
        const bool odd = i & Step;
        low[i] = odd ? i - Step + kLanes : i;
        high[i] = odd ? i + kLanes : i + Step;
      }
    }
    alignas(64) uint32_t low[kLanes] = {};
    alignas(64) uint32_t high[kLanes] = {};
  };
  static constexpr Order order;
  const auto x = bits<__m512i>(a), y = bits<__m512i>(b);
  a = bits<Words>(_mm512_permutex2var_epi32(x, _mm512_load_si512(order.low), y));
  b = bits<Words>(_mm512_permutex2var_epi32(x, _mm512_load_si512(order.high), y));
#elif defined(__AVX2__)
  const auto x = bits<__m256i>(a), y = bits<__m256i>(b);
  if constexpr (Step == 4) {
    a = bits<Words>(_mm256_permute2x128_si256(x, y, 0x20));
    b = bits<Words>(_mm256_permute2x128_si256(x, y, 0x31));
  } else if constexpr (Step == 2) {
    a = bits<Words>(_mm256_unpacklo_epi64(x, y));
    b = bits<Words>(_mm256_unpackhi_epi64(x, y));
  } else {
    a = bits<Words>(_mm256_blend_epi32(x, _mm256_slli_epi64(y, 32), 0xaa));
    b = bits<Words>(_mm256_blend_epi32(_mm256_srli_epi64(x, 32), y, 0xaa));
  }
#else
  const Words x = a, y = b;
  for (int i = 0; i < kLanes; ++i) {
    a[i] = i & Step ? y[i - Step] : x[i];
    b[i] = i & Step ? y[i] : x[i + Step];
  }
#endif
}

template <int Step = kLanes / 2>
QFUSE_INLINE void transpose(Words* x) {
  Unrolled<static_cast<int>(kLanes)>::run([&]<int I>() QFUSE_LAMBDA {
    if constexpr ((I & Step) == 0) exchange<Step>(x[I], x[I + Step]);
  });
  if constexpr (Step > 1) transpose<Step / 2>(x);
}

// Calls f with the types of an operand and of its products.
template <class F>
QFUSE_INLINE void with_types(Real given, Real product, const F& f) {
  if (given == Real::f16) return f.template operator()<Real::f16, Real::f32>();
  if (given == Real::f32) return f.template operator()<Real::f32, Real::f32>();
  if (product == Real::f32) return f.template operator()<Real::bf16, Real::f32>();
  f.template operator()<Real::bf16, Real::bf16>();
}

inline void copy_operand(const OperandRows& x, Real product, int64_t padded, void* to) {
  with_types(x.type, product, [&]<Real Given, Real Product>() {
    constexpr int64_t kPair = qfuse::pair_of(Product);
    auto* row = static_cast<uint32_t*>(to);
    for (int64_t i = 0; i < x.rows; ++i, row += padded / kPair) {
      int64_t w = 0;
      for (; is_whole(x, i, 1, w * kPair, kLanes * kPair); w += kLanes) {
        store(row + w, words_at<Given, Product, true>(x, i, w * kPair), kLanes);
      }
      for (; w < padded / kPair; w += kLanes) {
        store(row + w, words_at<Given, Product>(x, i, w * kPair), padded / kPair - w);
      }
    }
  });
}

inline void pack_columns(const OperandRows& x, Real product, int64_t padded, void* to) {
  with_types(x.type, product, [&]<Real Given, Real Product>() {
    constexpr int64_t kPair = qfuse::pair_of(Product);
    for (int64_t w = 0; w < padded / kPair; w += kLanes) {
      const int64_t count = padded / kPair - w < kLanes ? padded / kPair - w : kLanes;
      for (int64_t j = 0; j < qfuse::kBlock; j += kLanes) {
        Words words[kLanes];
        if (is_whole(x, j, kLanes, w * kPair, kLanes * kPair)) {
          Unrolled<static_cast<int>(kLanes)>::run([&]<int I>() QFUSE_LAMBDA {
            words[I] = words_at<Given, Product, true>(x, j + I, w * kPair);
          });
        } else {
          for (int64_t i = 0; i < kLanes; ++i) {
            words[i] = words_at<Given, Product>(x, j + i, w * kPair);
          }
        }
        transpose(words);
        uint32_t* column = static_cast<uint32_t*>(to) + w * qfuse::kBlock + j;
        Unrolled<static_cast<int>(kLanes)>::run([&]<int I>() QFUSE_LAMBDA {
          if (I < count) store(column + I * qfuse::kBlock, words[I], kLanes);
        });
      }
    }
  });
}

// Elements of two rows as pairs; zero behind the last row and feature, unless they are `Whole`.
template <bool Whole>
QFUSE_INLINE Words pairs_at(const OperandRows& x, int64_t row, int64_t feature) {
  const auto half = [&](int64_t i) QFUSE_LAMBDA {
    const int64_t rest = Whole ? kLanes : i < x.rows ? x.features - feature : 0;
    const int64_t count = rest < kLanes ? rest : kLanes;
    if (count <= 0) return Words{};
    uint16_t space[kLanes];
    const uint16_t* from = element_at<uint16_t>(x, i, feature);
    if (!Whole) from = adjacent(from, x.feature_stride, count, space);
    return widened(load<Halves>(from, count));
  };
  return half(row) | (half(row + 1) << 16);
}

// Writes a row of a panel, or a pair of rows.
template <Real Given, Real Product, bool Whole>
QFUSE_INLINE void pack_row(const OperandRows& x, int64_t row, uint32_t* to) {
  Unrolled<static_cast<int>(qfuse::kBlock / kLanes)>::run([&]<int V>() QFUSE_LAMBDA {
    Words words;
    if constexpr (Product == Real::bf16) {
      words = pairs_at<Whole>(x, row, V * kLanes);
    } else {
      words = words_at<Given, Product, Whole>(x, row, V * kLanes);
    }
    store(to + V * kLanes, words, kLanes);
  });
}

inline void pack_rows(const OperandRows& x, Real product, int64_t padded, void* to) {
  with_types(x.type, product, [&]<Real Given, Real Product>() {
    constexpr int64_t kPair = qfuse::pair_of(Product);
    auto* row = static_cast<uint32_t*>(to);
    for (int64_t i = 0; i < padded; i += kPair, row += qfuse::kBlock) {
      if (is_whole(x, i, kPair, 0, qfuse::kBlock)) {
        pack_row<Given, Product, true>(x, i, row);
      } else {
        pack_row<Given, Product, false>(x, i, row);
      }
    }
  });
}

inline void write_result(const qfuse::WeightedRows& w) {
  with_type(w.type, [&]<Real Type>() {
    for (int64_t i = 0; i < w.rows; ++i) {
      const float inverse = w.total[i] == 0.0f ? 0.0f : 1.0f / w.total[i];
      for (int64_t c = 0; c < w.features; c += kLanes) {
        const float* sums = w.sums + (c / qfuse::kBlock * w.ld + i) * qfuse::kBlock;
        const Floats x = load<Floats>(sums + c % qfuse::kBlock, kLanes);
        store_real(w.out, Type, i * w.out_ld + c, x * inverse, w.features - c);
      }
    }
  });
}

}  // namespace
