// Packed weights of 4, 8 and 16 bits to float weights, for any instruction set.
//
// If many rows use a weight, a panel of it is dequantized once and multiplied from the cache;
// otherwise it is dequantized in registers, so that only packed weights are read from memory.
#pragma once

#include "isa/fetch.h"
#include "isa/vec.h"

namespace {

QFUSE_INLINE Floats accumulated(Floats sum, Floats a, Floats b) {
#if defined(__FMA__) || defined(__AVX512F__)
  return fused(a, b, sum);
#else
  return a * b + sum;
#endif
}

// Calls f with the greatest constant up to Most that is at most `rows`, and returns it.
template <int Most, class F>
QFUSE_INLINE int64_t with_rows(int64_t rows, const F& f) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, f);
  }
  f.template operator()<Most>();
  return Most;
}

// Calls f with a constant for `yes`.
template <class F>
QFUSE_INLINE void with_flag(bool yes, const F& f) {
  if (yes) {
    f.template operator()<true>();
  } else {
    f.template operator()<false>();
  }
}

// Formats are named by the bits of their values; formats of floats follow.
constexpr int kE4m3 = 43;
constexpr int kE5m2 = 52;
constexpr int kHalf = 16;
template <int Bits>
constexpr bool kIsFloat = Bits > 8;
template <int Bits>
constexpr int kCodes = Bits == 4 ? 8 : Bits == kHalf ? 2 : 4;  // per word
// The middle value, which 4-bit values are relative to.
template <int Bits>
constexpr int kMiddle = Bits == 4 ? 8 : 0;

// A float8 of four exponent bits, in the low byte of a lane. Without arithmetic on subnormal floats,
// which a process may flush to zero.
QFUSE_INLINE Floats from_e4m3(Words byte) {
  const Words size = (byte & 0x7fu) << 20;  // its mantissa above that of a float
  const Floats normal = bits<Floats>(size + (120u << 23));
  const Floats small = bits<Floats>(size | (121u << 23)) - 0x1.0p-6f;
  Words value = size < (1u << 23) ? bits<Words>(small) : bits<Words>(normal);
  value = size == (0x7fu << 20) ? Words{} + 0x7fc00000u : value;
  return bits<Floats>(value | ((byte & 0x80u) << 24));
}

// A float8 of five exponent bits: the high byte of a float16.
QFUSE_INLINE Floats from_e5m2(Words byte) {
  const Words size = (byte & 0x7fu) << 21;
  const Floats normal = bits<Floats>(size + (112u << 23));
  const Floats small = bits<Floats>(size | (113u << 23)) - 0x1.0p-14f;
  Words value = size < (1u << 23) ? bits<Words>(small) : bits<Words>(normal);
  value = size >= (0x7cu << 21) ? size | 0x7f800000u : value;
  return bits<Floats>(value | ((byte & 0x80u) << 24));
}

// Words of one vector of features.
template <int Bits>
class Codes {
 public:
  QFUSE_INLINE void read(const uint8_t* from) {
    __builtin_memcpy(&words_, from, sizeof(words_));
#if !defined(__AVX512F__)
    if constexpr (Bits == 4) words_ ^= static_cast<int32_t>(0x88888888);  // signed from here on
#endif
  }

  // Value K of each feature as a float, minus the middle value.
  template <int K>
  QFUSE_INLINE Floats at() const {
    if constexpr (Bits == 8) {
      return __builtin_convertvector((words_ << (24 - 8 * K)) >> 24, Floats);
    } else if constexpr (Bits == kE4m3) {
      return from_e4m3(words() >> (8 * K));
    } else if constexpr (Bits == kE5m2) {
      return from_e5m2(words() >> (8 * K));
    } else if constexpr (Bits == kHalf) {
      return from_half(words() >> (16 * K));
    } else {
      constexpr int kShift = K % 4 * 8 + K / 4 * 4;
#if defined(__AVX512F__)
      // The low four bits of a lane are its index; what is above them does not matter.
      const Floats values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
      return _mm512_permutexvar_ps(bits<__m512i>(bits<Words>(words_) >> kShift), values);
#else
      return __builtin_convertvector((words_ << (28 - kShift)) >> 28, Floats);
#endif
    }
  }

  // The same, times `kRaised`, which saves shifting bytes back: masks and shifts use other ports.
  template <int K>
  QFUSE_INLINE Floats raised() const {
    if constexpr (Bits == 8) {
      const Ints top = K == 3 ? words_ : words_ << (24 - 8 * K);
      return __builtin_convertvector(K == 0 ? top : top & static_cast<int32_t>(0xff000000), Floats);
    } else {
      return at<K>();
    }
  }

  QFUSE_INLINE Words words() const { return bits<Words>(words_); }

 private:
  Ints words_;
};

template <int Bits>
constexpr float kRaised = Bits == 8 ? qfuse::kStreamRaise : 1.0f;

// Zero points of one vector of features, with as many bits as the values have.
template <int Bits>
QFUSE_INLINE Ints zero_codes_at(const int8_t* from) {
  const Ints zeros = widened(load<Bytes>(from, kLanes));
  return Bits == 4 ? zeros & 15 : zeros;
}

// Zero points minus the middle value, like the values above.
template <int Bits>
QFUSE_INLINE Floats zeros_at(const int8_t* from) {
  return __builtin_convertvector(zero_codes_at<Bits>(from), Floats) - kMiddle<Bits>;
}

// How values are dequantized in a panel.
enum class Panel { whole, scaled, scaled_bf16, any };

// The parameters of one vector of features in one group.
template <int Bits, Panel P, bool Zero>
struct Parameters {
  QFUSE_INLINE Parameters(const qfuse::RealBlock& b, int64_t group, int64_t column) : block(b) {
    const int64_t at = group * qfuse::kBlock + column;
    if constexpr (P != Panel::whole) scale = load<Floats>(b.scale + at, kLanes);
    if constexpr (Zero) zero = zeros_at<Bits>(b.zero + at);
    if constexpr (P == Panel::any) {
      if (b.offset) offset = load<Floats>(b.offset + at, kLanes);
    }
  }

  // Dequantizes a value.
  QFUSE_INLINE Floats weight(Floats code) const {
    if constexpr (Zero) code = code - zero;
    if constexpr (P == Panel::whole) return code;
    Floats w = code * scale;
    if constexpr (P == Panel::scaled_bf16) w = rounded_to(qfuse::Real::bf16, w);
    if constexpr (P == Panel::any) {
      w = rounded_to(block.compute, w);
      if (block.offset) w = rounded_to(block.compute, w + offset);
      w = rounded_to(block.real, w);
    }
    return w;
  }

  const qfuse::RealBlock& block;
  Floats scale;
  Floats zero;
  Floats offset;
};

// Calls put(k, column, low, high) with the weights of input features k and k + 1 of a panel.
template <int Bits, Panel P, bool Zero, class F>
QFUSE_INLINE void widen_groups(const qfuse::RealBlock& b, int64_t k, int64_t depth, const F& put) {
  for (int64_t begin = 0, end = 0; begin < depth; begin = end) {
    const int64_t group = (k + begin) / b.group;
    end = (group + 1) * b.group - k;
    if (end > depth) end = depth;
    for (int64_t column = 0; column < qfuse::kBlock; column += kLanes) {
      const Parameters<Bits, P, Zero> parameters(b, group, column);
      const uint8_t* from = b.codes + ((k + begin) / kCodes<Bits> * qfuse::kBlock + column) * 4;
      for (int64_t i = begin; i < end; i += kCodes<Bits>, from += 4 * qfuse::kBlock) {
        Codes<Bits> codes;
        codes.read(from);
        Unrolled<kCodes<Bits> / 2>::run([&]<int J>() QFUSE_LAMBDA {
          put(i + 2 * J, column, parameters.weight(codes.template at<2 * J>()),
              parameters.weight(codes.template at<2 * J + 1>()));
        });
      }
    }
  }
}

// Calls f with a constant for whether values have the parameter; those of floats do not.
template <int Bits, class Parameter, class F>
QFUSE_INLINE void with_parameter(const Parameter* parameter, const F& f) {
  if constexpr (kIsFloat<Bits>) {
    f.template operator()<false>();
  } else {
    with_flag(parameter != nullptr, f);
  }
}

// Calls f with how the block's values are dequantized, and whether they have zero points.
template <int Bits, class F>
QFUSE_INLINE void with_panel(const qfuse::RealBlock& b, const F& f) {
  using qfuse::Real;
  const bool widened = b.real == Real::f32 && b.compute == Real::f32;
  with_parameter<Bits>(b.zero, [&]<bool Zero>() QFUSE_LAMBDA {
    if (!b.scale) return f.template operator()<Panel::whole, Zero>();
    if (!b.offset && widened) return f.template operator()<Panel::scaled, Zero>();
    // Rounding a product to bfloat16 is idempotent.
    if (!b.offset && b.real == Real::bf16 && b.compute != Real::f16) {
      return f.template operator()<Panel::scaled_bf16, Zero>();
    }
    f.template operator()<Panel::any, Zero>();
  });
}

template <int Bits>
void widen_to_f32(const qfuse::RealBlock& b, int64_t k, int64_t depth, float* panel) {
  with_panel<Bits>(b, [&]<Panel P, bool Zero>() {
    widen_groups<Bits, P, Zero>(
        b, k, depth, [&](int64_t i, int64_t column, Floats low, Floats high) QFUSE_LAMBDA {
          store(panel + i * qfuse::kBlock + column, low, kLanes);
          store(panel + (i + 1) * qfuse::kBlock + column, high, kLanes);
        });
  });
}

// Adds the contribution of a group to the sums of a row; without a scale there is only one group.
QFUSE_INLINE void add_share(const qfuse::RealBlock& b, int64_t at, Floats total, float* sums) {
  if (b.scale) {
    const Floats before = load<Floats>(sums, kLanes);
    total = accumulated(before, total, load<Floats>(b.scale + at, kLanes));
  }
  store(sums, total, kLanes);
}

// Adds the contribution of one group to the sums of `Vectors` vectors of features.
template <int Bits, int Rows, int Vectors, bool Zero, bool Offset>
QFUSE_INLINE void stream_group(const qfuse::RealBlock& b, const float* a, int64_t lda,
                               int64_t group, int64_t column, float* sums) {
  Floats total[Rows * Vectors] = {};
  Floats terms[Rows] = {};  // sums of the row, which multiply the offsets
  Floats zero[Vectors];
  const int64_t at = group * qfuse::kBlock + column;
  if constexpr (Zero) {
    Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
      zero[I] = zeros_at<Bits>(b.zero + at + I * kLanes) * kRaised<Bits>;
    });
  }
  const uint8_t* from = b.codes + (group * b.group / kCodes<Bits> * qfuse::kBlock + column) * 4;
  a += group * b.group;
  for (int64_t k = 0; k < b.group; k += kCodes<Bits>, from += 4 * qfuse::kBlock) {
    Codes<Bits> codes[Vectors];
    Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
      codes[I].read(from + I * kLanes * 4);
      fetch_weights<kLanes * 4>(from + I * kLanes * 4);
    });
    Unrolled<kCodes<Bits>>::run([&]<int J>() QFUSE_LAMBDA {
      if constexpr (Offset) {
        Unrolled<Rows>::run([&]<int R>()
                                QFUSE_LAMBDA { terms[R] += broadcast(a[R * lda + k + J]); });
      }
      Unrolled<Vectors>::run([&]<int I>() QFUSE_LAMBDA {
        Floats code = codes[I].template raised<J>();
        if constexpr (Zero) code = code - zero[I];
        Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
          total[R * Vectors + I] =
              accumulated(total[R * Vectors + I], broadcast(a[R * lda + k + J]), code);
        });
      });
    });
  }
  Unrolled<Rows * Vectors>::run([&]<int I>() QFUSE_LAMBDA {
    constexpr int64_t kColumn = I % Vectors * kLanes;
    float* to = sums + I / Vectors * qfuse::kBlock + column + kColumn;
    add_share(b, at + kColumn, total[I] * (1.0f / kRaised<Bits>), to);
    if constexpr (Offset) {
      const Floats offset = load<Floats>(b.offset + at + kColumn, kLanes);
      store(to, accumulated(load<Floats>(to, kLanes), terms[I / Vectors], offset), kLanes);
    }
  });
}

template <int Rows>
QFUSE_INLINE void clear_rows(float* sums) {
  __builtin_memset(sums, 0, Rows * qfuse::kBlock * sizeof(float));
}

QFUSE_INLINE int64_t groups_of(const qfuse::RealBlock& b) {
  return b.group > 0 ? b.depth / b.group : 1;
}

// Fetches what a later group multiplies its sums by, and what it subtracts and adds.
QFUSE_INLINE void fetch_group_parameters(const qfuse::RealBlock& b, int64_t group) {
  const int64_t at = group * qfuse::kBlock;
  if (b.scale) fetch_parameters(b.scale + at);
  if (b.zero) fetch_parameters(b.zero + at);
  if (b.offset) fetch_parameters(b.offset + at);
}

// `Vectors` are those whose sums of kStreamRows rows fit in registers. One or two rows take more, up
// to a block, because products wait for the sum that they are added to.
template <int Bits, int Vectors>
void stream_f32(const qfuse::RealBlock& b, const float* a, int64_t lda, int64_t rows,
                int64_t columns, float* sums) {
  with_rows<qfuse::kStreamRows>(rows, [&]<int R>() {
    constexpr int kMost = qfuse::kBlock / kLanes;
    constexpr int kFit = Vectors * (qfuse::kStreamRows / R);
    constexpr int kAtOnce = kFit < kMost ? kFit : kMost;
    static_assert(kMost % kAtOnce == 0);
    clear_rows<R>(sums);
    with_parameter<Bits>(b.zero, [&]<bool Zero>() {
      with_parameter<Bits>(b.offset, [&]<bool Offset>() {
        for (int64_t g = 0; g < groups_of(b); ++g) {
          fetch_group_parameters(b, g);
          for (int64_t column = 0; column < columns; column += kAtOnce * kLanes) {
            stream_group<Bits, R, kAtOnce, Zero, Offset>(b, a, lda, g, column, sums);
          }
        }
      });
    });
  });
}

// The kernels for float32 only: other types are converted before.
template <int Bits, int Vectors>
constexpr qfuse::CodeKernels f32_codes{
    .widen = [](const qfuse::RealBlock& b, int64_t k, int64_t depth, qfuse::Real,
                void* panel) { widen_to_f32<Bits>(b, k, depth, static_cast<float*>(panel)); },
    .stream_type = [](qfuse::Real, int64_t) { return qfuse::Real::f32; },
    .stream = [](const qfuse::RealBlock& b, const void* a, int64_t lda, int64_t rows,
                 int64_t columns, float* sums) {
      stream_f32<Bits, Vectors>(b, static_cast<const float*>(a), lda, rows, columns, sums);
    },
};

}  // namespace
