// Integer sums that become quantized values at once, with one quantized operand added at most: the
// operations of Epilogue with all constants in registers.
#pragma once

#include "linear/columns.h"

namespace {

// What happens to sums before they are quantized.
enum class Quantizing { other, sums, plus_s8, plus_u8 };

inline Quantizing quantizing(const qfuse::Epilogue& e) {
  using qfuse::Element;
  const bool stored = e.out_type == Element::s8 || e.out_type == Element::u8;
  const bool plain = stored && e.quantizer.plain && !e.quantizer.divide;
  const bool same = !e.real_sums && !e.zero_per_row && !e.w_zero && e.real == qfuse::Real::f32;
  if (!plain || !same) return Quantizing::other;
  if (e.steps == 0) return Quantizing::sums;
  const qfuse::Step& step = e.step[0];
  const bool adds = e.steps == 1 && step.kind == qfuse::StepKind::add;
  if (!adds || step.type != qfuse::Real::f32) return Quantizing::other;
  const Element type = e.extra[step.extra].type;
  if (type == Element::s8) return Quantizing::plus_s8;
  return type == Element::u8 ? Quantizing::plus_u8 : Quantizing::other;
}

struct NoAddend {
  QFUSE_INLINE NoAddend(const qfuse::Epilogue&, int64_t, int64_t) {}
  QFUSE_INLINE void advance() {}
  QFUSE_INLINE Floats added(Floats y, int64_t, int64_t) const { return y; }
  QFUSE_INLINE Floats reach() const { return Floats{}; }
};

// The rows of a quantized operand from a row and a column on.
template <qfuse::Element Type>
struct Addend {
  QFUSE_INLINE Addend(const qfuse::Epilogue& e, int64_t row, int64_t column)
      : zero(broadcast(e.step[0].b)), scale(broadcast(e.step[0].scale)), alpha(broadcast(e.step[0].a)) {
    const qfuse::ElementRows& x = e.extra[e.step[0].extra];
    from = static_cast<const int8_t*>(x.data) + row * x.ld + column;
    ld = x.ld;
  }
  QFUSE_INLINE void advance() { from += ld; }
  QFUSE_INLINE Floats added(Floats y, int64_t at, int64_t count) const {
    const Bytes bytes = load<Bytes>(from + at, count);
    const Ints codes = Type == qfuse::Element::s8 ? widened(bytes) : widened_unsigned(bytes);
    return y + (__builtin_convertvector(codes, Floats) - zero) * scale * alpha;
  }
  // At least the magnitude of what is added.
  QFUSE_INLINE Floats reach() const {
    return magnitude((magnitude(zero) + 256.0f) * scale * alpha);
  }

  const int8_t* from;
  int64_t ld;
  Floats zero;
  Floats scale;
  Floats alpha;
};

#if defined(__AVX512BW__)
// Whether no sum leads to a NaN, nor to a value whose rounded quotient by the output scale is 2^30
// or more.
template <int Vectors, class Added>
QFUSE_INLINE bool stays_small(const qfuse::Epilogue& e, const Columns<Vectors>& c,
                              const Added& added) {
  const Floats scale = magnitude(broadcast(e.x_scale[0]));
  bool small = !e.scale_per_row;
  c.each([&](int64_t v, int64_t) QFUSE_LAMBDA {
    // In the order of the operations, so that what overflows in them does so here.
    const Floats y = 0x1p31f * scale * magnitude(c.scale[v]) + magnitude(c.bias[v]) + added.reach();
    const Floats x = y * broadcast(e.quantizer.factor);
    small = small && _mm512_cmp_ps_mask(magnitude(x), broadcast(0x1p29f), _CMP_NLT_UQ) == 0;
  });
  return small;
}

// Stores integers clamped to a range of int8 or uint8. Those of `x` are less than 2^31 in magnitude.
template <int Vectors>
QFUSE_INLINE void store_clamped(int8_t* out, const Ints* x, __m512i low, __m512i high,
                                bool is_signed) {
  const auto clamped = [&](Ints a, Ints b) QFUSE_LAMBDA {
    const __m512i both = _mm512_packs_epi32(bits<__m512i>(a), bits<__m512i>(b));
    return _mm512_min_epi16(_mm512_max_epi16(both, low), high);
  };
  // Within 16 bytes, packing takes four values of each operand in turn.
  if constexpr (Vectors == 4) {
    const __m512i a = clamped(x[0], x[1]);
    const __m512i b = clamped(x[2], x[3]);
    const __m512i packed = is_signed ? _mm512_packs_epi16(a, b) : _mm512_packus_epi16(a, b);
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, packed));
  } else {
    static_assert(Vectors == 2);
    const __m256i packed = _mm512_cvtepi16_epi8(clamped(x[0], x[1]));
    const __m256i order = _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_permutevar8x32_epi32(packed, order));
  }
}
#endif

template <int Vectors, class Added>
void quantize_columns(const qfuse::Epilogue& e, const int32_t* sums, int64_t row, int64_t rows,
                      int64_t column, int64_t columns) {
  const Columns<Vectors> c(e, column, columns);
  Added added(e, row, column);
  const qfuse::Quantizer q = e.quantizer;
  const Ints zero = broadcast(static_cast<int32_t>(q.zero));
  auto* out = static_cast<int8_t*>(e.out) + (row - e.out_row) * e.out_ld + column;
  const auto scaled = [&](int64_t v, int64_t count, float scale) QFUSE_LAMBDA {
    const Words total = bits<Words>(load<Ints>(sums + v * kLanes, kLanes)) - c.offset[v];
    const Floats x = __builtin_convertvector(bits<Ints>(total), Floats) * scale * c.scale[v];
    // Without a bias this is x + 0, which quantizes to the same.
    return added.added(x + c.bias[v], v * kLanes, count) * q.factor;
  };
#if defined(__AVX512BW__)
  if constexpr (Vectors == 2 || Vectors == 4) {
    if (stays_small(e, c, added)) {
      // Rounding is monotonic, so that clamping after it to rounded bounds is the same.
      const auto bound = [&](float x) QFUSE_LAMBDA {
        const Ints code = nearest(broadcast(x)) + zero;
        return _mm512_set1_epi16(static_cast<int16_t>(code[0]));
      };
      const __m512i low = bound(q.least), high = bound(q.most);
      const bool is_signed = e.out_type == qfuse::Element::s8;
      const float scale = e.x_scale[0];
      for (int64_t i = 0; i < rows; ++i, sums += qfuse::kBlock, out += e.out_ld, added.advance()) {
        Ints x[Vectors];
        Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
          x[V] = nearest(scaled(V, kLanes, scale)) + zero;
        });
        store_clamped<Vectors>(out, x, low, high, is_signed);
      }
      return;
    }
  }
#endif
  for (int64_t i = 0; i < rows; ++i, sums += qfuse::kBlock, out += e.out_ld, added.advance()) {
    const float scale = e.x_scale[e.scale_per_row ? row + i : 0];
    c.each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      const Floats y = clamp(scaled(v, count, scale), q.least, q.most);
      store(out + v * kLanes, __builtin_convertvector(moved_nearest(y, zero), Bytes), count);
    });
  }
}

}  // namespace
