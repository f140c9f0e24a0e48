// Rows of 8-bit values or floats through epilogue ops into 8-bit values, for any instruction set. See
// StoredRows.
#pragma once

#include "rowwise/clamped_store.h"

namespace {

// Elements of adjacent columns of a row.
template <qfuse::Element Type>
QFUSE_INLINE Floats stored_values(const void* row, int64_t at, int64_t count) {
  if constexpr (Type == qfuse::Element::f32) {
    return load<Floats>(static_cast<const float*>(row) + at, count);
  } else {
    const Bytes bytes = load<Bytes>(static_cast<const int8_t*>(row) + at, count);
    const Ints codes = Type == qfuse::Element::s8 ? widened(bytes) : widened_unsigned(bytes);
    return __builtin_convertvector(codes, Floats);
  }
}

template <qfuse::Element Type>
QFUSE_INLINE const void* row_of(const qfuse::ElementRows& rows, int64_t row) {
  if constexpr (Type == qfuse::Element::f32) return static_cast<const float*>(rows.data) + row * rows.ld;
  return static_cast<const int8_t*>(rows.data) + row * rows.ld;
}

// The parameters of adjacent columns.
template <qfuse::Element Type, int Vectors>
class StoredColumns : public Span<Vectors> {
 public:
  QFUSE_INLINE StoredColumns(const qfuse::StoredRows& r, int64_t column, int64_t columns)
      : Span<Vectors>{column, columns} {
    if constexpr (Type == qfuse::Element::f32) return;
    this->each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      scale[v] = load<Floats>(r.scale + column + v * kLanes, count);
      zero[v] = load<Floats>(r.zero + column + v * kLanes, count);
    });
  }

  // The floats of a vector of a row.
  template <bool Zero = true>
  QFUSE_INLINE Floats value(const void* row, int64_t v, int64_t count) const {
    const Floats x = stored_values<Type>(row, this->column + v * kLanes, count);
    if constexpr (Type == qfuse::Element::f32) return x;
    return (Zero ? x - zero[v] : x) * scale[v];
  }

  Floats scale[kVectors];
  Floats zero[kVectors];
};

// An epilogue that is a product with one factor, and a sum with one summand, per column, or less.
struct Affine {
  bool matches = false;
  const qfuse::Step* factor = nullptr;
  const qfuse::Step* summand = nullptr;

  explicit Affine(const qfuse::Epilogue& e) {
    using Kind = qfuse::StepKind;
    const qfuse::Quantizer& q = e.quantizer;
    int64_t step = 0;
    const auto take = [&](Kind kind) -> const qfuse::Step* {
      if (step == e.steps) return nullptr;
      const qfuse::Step& s = e.step[step];
      const bool same = s.kind == kind && s.type == qfuse::Real::f32 && e.extra[s.extra].ld == 0;
      return same ? &e.step[step++] : nullptr;
    };
    factor = take(Kind::mul);
    summand = take(Kind::add);
    matches = step == e.steps && q.plain && !q.divide && q.type == qfuse::Real::f32;
  }
};

template <qfuse::Element Type, int Vectors>
class AffineColumns : public StoredColumns<Type, Vectors> {
 public:
  QFUSE_INLINE AffineColumns(const qfuse::StoredRows& r, const Affine& by, int64_t column,
                             int64_t columns)
      : StoredColumns<Type, Vectors>(r, column, columns) {
    const auto operand = [&](const qfuse::Step& s, int64_t v, int64_t count) QFUSE_LAMBDA {
      return load_operand(r.epilogue->extra[s.extra], s, column + v * kLanes, count);
    };
    this->each([&](int64_t v, int64_t count) QFUSE_LAMBDA {
      factor[v] = by.factor ? operand(*by.factor, v, count) : broadcast(1.0f);
      // Adding 0 to a value quantizes to the same.
      summand[v] = by.summand ? operand(*by.summand, v, count) * by.summand->a : Floats{};
    });
  }

  template <bool Zero = true>
  QFUSE_INLINE Floats result(const void* row, int64_t v, int64_t count) const {
    return this->template value<Zero>(row, v, count) * factor[v] + summand[v];
  }

  Floats factor[kVectors];
  Floats summand[kVectors];
};

#if defined(__AVX512BW__)
// Whether no value leads to a NaN, nor to one that ClampedStore does not take.
template <qfuse::Element Type, int Vectors>
QFUSE_INLINE bool stays_small(const qfuse::Quantizer& q, const AffineColumns<Type, Vectors>& c) {
  bool small = takes_clamped(q);
  c.each([&](int64_t v, int64_t) QFUSE_LAMBDA {
    const Floats most = (magnitude(c.zero[v]) + 256.0f) * magnitude(c.scale[v]);
    const Floats y = most * magnitude(c.factor[v]) + magnitude(c.summand[v]);
    small = small && is_clamped_small(y * q.factor);
  });
  return small;
}

template <qfuse::Element Type, int Vectors, bool Zero>
QFUSE_INLINE void requantize_small(const qfuse::StoredRows& r, const AffineColumns<Type, Vectors>& c,
                                   int64_t count) {
  const qfuse::Epilogue& e = *r.epilogue;
  const ClampedStore<Vectors> store(e.quantizer, e.out_type);
  const float factor = e.quantizer.factor;
  auto* out = static_cast<int8_t*>(e.out) + c.column;
  for (int64_t i = 0; i < count; ++i, out += e.out_ld) {
    const void* row = row_of<Type>(r.rows, i);
    Ints x[Vectors];
    Unrolled<Vectors>::run([&]<int V>() QFUSE_LAMBDA {
      x[V] = nearest(c.template result<Zero>(row, V, kLanes) * factor);
    });
    store(out, x);
  }
}

template <qfuse::Element Type, int Vectors>
QFUSE_INLINE bool has_zero(const AffineColumns<Type, Vectors>& c) {
  bool found = false;
  c.each([&](int64_t v, int64_t) QFUSE_LAMBDA {
    found = found || _mm512_cmp_ps_mask(c.zero[v], Floats{}, _CMP_NEQ_UQ) != 0;
  });
  return found;
}
#endif

template <qfuse::Element Type, int Vectors>
void requantize_affine(const qfuse::StoredRows& r, const Affine& by, int64_t count, int64_t column,
                       int64_t columns) {
  const AffineColumns<Type, Vectors> c(r, by, column, columns);
  const qfuse::Epilogue& e = *r.epilogue;
  const qfuse::Quantizer& q = e.quantizer;
#if defined(__AVX512BW__)
  if constexpr (Type != qfuse::Element::f32 && (Vectors == 2 || Vectors == 4)) {
    if (stays_small(q, c)) {
      if (has_zero(c)) return requantize_small<Type, Vectors, true>(r, c, count);
      return requantize_small<Type, Vectors, false>(r, c, count);
    }
  }
#endif
  const Ints zero = broadcast(static_cast<int32_t>(q.zero));
  auto* out = static_cast<int8_t*>(e.out) + column;
  for (int64_t i = 0; i < count; ++i, out += e.out_ld) {
    const void* row = row_of<Type>(r.rows, i);
    c.each([&](int64_t v, int64_t lanes) QFUSE_LAMBDA {
      const Floats y = clamp(c.result(row, v, lanes) * q.factor, q.least, q.most);
      store(out + v * kLanes, low_bytes(moved_nearest(y, zero)), lanes);
    });
  }
}

template <qfuse::Element Type, int Vectors>
void requantize_steps(const qfuse::StoredRows& r, int64_t count, int64_t column, int64_t columns) {
  const StoredColumns<Type, Vectors> c(r, column, columns);
  const qfuse::Epilogue& e = *r.epilogue;
  auto* out = static_cast<int8_t*>(e.out) + column;
  Floats y[kVectors] = {};
  for (int64_t i = 0; i < count; ++i, out += e.out_ld) {
    const void* row = row_of<Type>(r.rows, i);
    c.each([&](int64_t v, int64_t lanes) QFUSE_LAMBDA { y[v] = c.value(row, v, lanes); });
    const Span<Vectors>& span = c;
    for (int64_t s = 0; s < e.steps; ++s) apply(e.step[s], e.extra, span, i, y);
    c.each([&](int64_t v, int64_t lanes) QFUSE_LAMBDA {
      const Ints codes = quantized<false>(e.quantizer, y[v]);
      store(out + v * kLanes, low_bytes(codes), lanes);
    });
  }
}

template <qfuse::Element Type>
void requantize_rows(const qfuse::StoredRows& r, int64_t count) {
  const Affine affine(*r.epilogue);
  each_width(r.columns, [&]<int Vectors>(int64_t column, int64_t columns) {
    if (affine.matches) return requantize_affine<Type, Vectors>(r, affine, count, column, columns);
    requantize_steps<Type, Vectors>(r, count, column, columns);
  });
}

void requantize(const qfuse::StoredRows& r, int64_t count) {
  switch (r.rows.type) {
    case qfuse::Element::s8:
      return requantize_rows<qfuse::Element::s8>(r, count);
    case qfuse::Element::u8:
      return requantize_rows<qfuse::Element::u8>(r, count);
    default:
      return requantize_rows<qfuse::Element::f32>(r, count);
  }
}

}  // namespace
