// Packed weights as pairs of bfloat16, for AVX512 with bfloat16 dot products.
#pragma once

#include "quantized/codes.h"

namespace {

// sum += dot products of two bfloat16 of a with two of b. Inline assembly, because this file is not
// compiled for AVX512_BF16: its float32 code must run without it.
QFUSE_INLINE void dot(Floats& sum, Ints a, Ints b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// 8-bit integers and floats are exact in bfloat16: the low half of their float32 is zero.
QFUSE_INLINE Words exact_pair(Floats low, Floats high) {
  return bits<Words>(high) | (bits<Words>(low) >> 16);
}

// Both rounded to bfloat16; subnormals are flushed to zero, as in the multiplication.
QFUSE_INLINE Words rounded_pair(Floats low, Floats high) {
  const Shorts order = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                        8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(high), "v"(low));
  return bits<Words>(_mm512_permutexvar_epi16(bits<__m512i>(order), both));
}

template <int Bits>
void widen_to_bf16(const qfuse::RealBlock& b, int64_t k, int64_t depth, uint32_t* panel) {
  const auto widen = [&]<Panel P, bool Zero>() {
    widen_groups<Bits, P, Zero>(
        b, k, depth, [&](int64_t i, int64_t column, Floats low, Floats high) QFUSE_LAMBDA {
          uint32_t* to = panel + i / 2 * qfuse::kBlock + column;
          store(to, P == Panel::whole ? exact_pair(low, high) : rounded_pair(low, high), kLanes);
        });
  };
  with_panel<Bits>(b, [&]<Panel P, bool Zero>() {
    // Storing rounds to bfloat16 anyway.
    widen.template operator()<P == Panel::scaled_bf16 ? Panel::scaled : P, Zero>();
  });
}

// I - Middle as bfloat16, exact; with five bits, I is signed.
constexpr uint16_t bf16_of(int number) {
  return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, static_cast<float>(number)) >> 16);
}

struct Table {
  constexpr explicit Table(bool zero) {
    for (int i = 0; i < 32; ++i) values[i] = bf16_of(zero ? (i < 16 ? i : i - 32) : i % 16 - 8);
  }
  alignas(64) uint16_t values[32] = {};
};
// Lookup tables: a value by its four lowest bits, and the difference of two values by five.
constexpr Table kCodeTable(false);
constexpr Table kDifferenceTable(true);

// Values of one vector of features as pairs, minus the zero points of a group.
template <int Bits, bool Zero>
class Pairs {
 public:
  QFUSE_INLINE void read_zeros(const int8_t* from) {
    if constexpr (Bits == 4) {
      zero_ = bits<Floats>(zero_codes_at<Bits>(from) * 0x10001);
    } else {
      zero_ = zeros_at<Bits>(from);
    }
  }
  QFUSE_INLINE void read(const uint8_t* from) { codes_.read(from); }

  // Pair J of a word; 4-bit values are in the order of kStreamOrder.
  template <int J>
  QFUSE_INLINE Ints at() const {
    if constexpr (Bits == 4) {
      Words codes = codes_.words() >> (4 * J);
      if constexpr (Zero) {
        codes = bits<Words>(bits<Shorts>(codes & 0x000f000fu) - bits<Shorts>(zero_));
      }
      const __m512i table = _mm512_load_si512((Zero ? kDifferenceTable : kCodeTable).values);
      return bits<Ints>(_mm512_permutexvar_epi16(bits<__m512i>(codes), table));
    } else {
      Floats low = codes_.template at<2 * J>();
      Floats high = codes_.template at<2 * J + 1>();
      if constexpr (Zero) {
        low = low - zero_;
        high = high - zero_;
      }
      return bits<Ints>(exact_pair(low, high));
    }
  }

 private:
  Codes<Bits> codes_;
  Floats zero_;
};

// Adds the contribution of one group to the sums of a block.
template <int Bits, int Rows, bool Zero, bool Offset>
QFUSE_INLINE void stream_bf16_group(const qfuse::RealBlock& b, const uint16_t* a, int64_t lda,
                                    int64_t group, float* sums) {
  constexpr int kVectors4 = qfuse::kBlock / kLanes;
  constexpr int kSets = Rows <= 2 ? 2 : 1;  // independent chains of sums
  Floats total[kSets * Rows * kVectors4] = {};
  Floats terms[Rows] = {};
  Pairs<Bits, Zero> pairs[kVectors4];
  const int64_t at = group * qfuse::kBlock;
  if constexpr (Zero) {
    Unrolled<kVectors4>::run(
        [&]<int I>() QFUSE_LAMBDA { pairs[I].read_zeros(b.zero + at + I * kLanes); });
  }
  const uint8_t* from = b.codes + group * b.group / kCodes<Bits> * qfuse::kBlock * 4;
  a += group * b.group;
  for (int64_t k = 0; k < b.group; k += kCodes<Bits>, from += 4 * qfuse::kBlock) {
    fetch_weights<64 * kVectors4>(from);
    Unrolled<kVectors4>::run([&]<int I>() QFUSE_LAMBDA { pairs[I].read(from + 64 * I); });
    Unrolled<kCodes<Bits> / 2>::run([&]<int J>() QFUSE_LAMBDA {
      Ints x[Rows];
      Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
        int32_t both;
        __builtin_memcpy(&both, a + R * lda + k + 2 * J, sizeof(both));
        x[R] = broadcast(both);
        if constexpr (Offset) dot(terms[R], x[R], broadcast(int32_t{0x3f803f80}));
      });
      Unrolled<kVectors4>::run([&]<int I>() QFUSE_LAMBDA {
        const Ints w = pairs[I].template at<J>();
        Unrolled<Rows>::run([&]<int R>() QFUSE_LAMBDA {
          dot(total[(J % kSets * Rows + R) * kVectors4 + I], x[R], w);
        });
      });
    });
  }
  Unrolled<Rows * kVectors4>::run([&]<int I>() QFUSE_LAMBDA {
    float* to = sums + I * kLanes;
    Floats share = total[I];
    if constexpr (kSets == 2) share += total[Rows * kVectors4 + I];
    add_share(b, at + I % kVectors4 * kLanes, share, to);
    if constexpr (Offset) {
      const Floats offset = load<Floats>(b.offset + at + I % kVectors4 * kLanes, kLanes);
      store(to, fused(terms[I / kVectors4], offset, load<Floats>(to, kLanes)), kLanes);
    }
  });
}

template <int Bits>
void stream_bf16(const qfuse::RealBlock& b, const uint16_t* a, int64_t lda, int64_t rows,
                 float* sums) {
  with_rows<qfuse::kStreamRows>(rows, [&]<int R>() {
    clear_rows<R>(sums);
    with_parameter<Bits>(b.zero, [&]<bool Zero>() {
      with_parameter<Bits>(b.offset, [&]<bool Offset>() {
        for (int64_t g = 0; g < groups_of(b); ++g) {
          fetch_group_parameters(b, g);
          stream_bf16_group<Bits, R, Zero, Offset>(b, a, lda, g, sums);
        }
      });
    });
  });
}

}  // namespace
