// Activation functions on vectors. Errors against the true function were measured over all of
// [-20, 20] in float32 steps by tests/kernels/test_activations.py, which holds their bounds.
#pragma once

#include "vec.h"

namespace {

// e^x: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r (Cephes' expf), times 2^n.
// 2^n is applied in two halves: n reaches 128, and below -126 the result is subnormal.
QFUSE_INLINE Floats exponential(Floats x) {
  const Floats y = clamp(x, -104.0f, 88.7228394f);
  const Floats n = round_even(y * 1.44269504f);
  const Floats r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints whole = __builtin_convertvector(n == n ? n : Floats{}, Ints);
  const Ints half = whole >> 1;
  const Floats first = bits<Floats>((half + 127) << 23);
  const Floats second = bits<Floats>((whole - half + 127) << 23);
  return p * first * second;
}

QFUSE_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

QFUSE_INLINE Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

// Away from 0 through e^2x; near 0, where that cancels, an odd polynomial (Cephes' tanhf).
QFUSE_INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats s = x * x;
  Floats p = s * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * s + -5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s + -3.33332819422e-1f;
  const Floats near = p * s * x + x;
  const Floats far = 1.0f - 2.0f / (exponential(2.0f * magnitude(x)) + 1.0f);
  const Words sign = bits<Words>(x) & 0x80000000u;
  return magnitude(x) < 0.625f ? near : bits<Floats>(bits<Words>(far) | sign);
}

// An odd rational function on the range where the true one is not yet +-1 in float32. The coefficients
// are those of Eigen's generic_fast_erf_float.
QFUSE_INLINE Floats error_function(Floats x) {
  const float one = 3.92f;  // from here on it is 1 in float32; gelu's left tail shows the difference
  const Floats c = clamp(x, -one, one);
  const Floats s = c * c;
  Floats p = s * -2.72614225801306e-10f + 2.77068142495902e-08f;
  p = p * s + -2.10102402082508e-06f;
  p = p * s + -5.69250639462346e-05f;
  p = p * s + -7.34990630326855e-04f;
  p = p * s + -2.95459980854025e-03f;
  p = p * s + -1.60960333262415e-02f;
  Floats q = s * -1.45660718464996e-05f + -2.13374055278905e-04f;
  q = q * s + -1.68282697438203e-03f;
  q = q * s + -7.37332916720468e-03f;
  q = q * s + -1.42647390514189e-02f;
  const Floats tail = bits<Floats>((bits<Words>(x) & 0x80000000u) | 0x3f800000u);
  return magnitude(x) >= one ? tail : c * p / q;
}

QFUSE_INLINE Floats gelu(Floats x) { return x * 0.5f * (1.0f + error_function(x * 0.70710678f)); }

// x / 2 * (1 + tanh u) is x / (1 + e^-2u), which does not cancel.
QFUSE_INLINE Floats gelu_tanh(Floats x) {
  const Floats u = 0.79788456f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-2.0f * u));
}

QFUSE_INLINE Floats hardswish(Floats x) { return x * clamp(x + 3.0f, 0.0f, 6.0f) / 6.0f; }

QFUSE_INLINE Floats hardsigmoid(Floats x) { return clamp(x + 3.0f, 0.0f, 6.0f) / 6.0f; }

}  // namespace
