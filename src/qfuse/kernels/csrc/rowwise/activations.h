// Activation functions on vectors. Errors against the true functions are measured over
// [-20, 20] by tests/kernels/test_epilogue.py, whose bounds are in cases.py.
#pragma once

#include "isa/vec.h"

namespace {

// e^x = (minus_one + 1) * power.
struct Exponential {
  Floats minus_one;  // in about [-0.3, 0.42]
  Floats power;      // of two
};

// For x in [-87, 88.37]; e^-87 below, infinity above, which suffices in sums with 1 and in
// divisors. x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r - 1 (Cephes' expf), and 2^n.
// Adding 1.5 * 2^23 rounds n to an integer in the low bits, from where it is shifted into the
// exponent; n = 128 is infinity there.
QFUSE_INLINE Exponential parts_of_exponential(Floats x) {
  const float push = 12582912.0f;
  const Floats y = clamp(x, -87.0f, 89.0f);
  const Floats pushed = y * 1.44269504f + push;
  const Floats n = pushed - push;
  const Floats r = fused(n, broadcast(2.12194440e-4f), fused(n, broadcast(-0.693359375f), y));
  Floats p = fused(r, 1.9875691500e-4f, 1.3981999507e-3f);
  p = fused(p, r, 8.3334519073e-3f);
  p = fused(p, r, 4.1665795894e-2f);
  p = fused(p, r, 1.6666665459e-1f);
  p = fused(p, r, 5.0000001201e-1f);
  return {fused(p, r * r, r), bits<Floats>((bits<Words>(pushed) << 23) + 0x3f800000u)};
}

QFUSE_INLINE Floats exponential(Floats x) {
  const Exponential e = parts_of_exponential(x);
  return (e.minus_one + 1.0f) * e.power;
}

// e^x - 1 without cancellation. Where e^x is large, 2^n is subtracted from nothing, so that
// infinity stays what it is.
QFUSE_INLINE Floats exponential_minus_one(Floats x) {
  const Exponential e = parts_of_exponential(x);
  const Floats large = (e.minus_one + 1.0f) * e.power - 1.0f;
  return x > 1.0f ? large : fused(e.minus_one, e.power, e.power - 1.0f);
}

QFUSE_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

QFUSE_INLINE Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

// Through e^2x away from 0; near 0, where that cancels, an odd polynomial (Cephes' tanhf).
QFUSE_INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats s = x * x;
  Floats p = fused(s, -5.70498872745e-3f, 2.06390887954e-2f);
  p = fused(p, s, -5.37397155531e-2f);
  p = fused(p, s, 1.33314422036e-1f);
  p = fused(p, s, -3.33332819422e-1f);
  const Floats near = fused(p * s, x, x);
  const Floats far = 1.0f - 2.0f / (exponential(2.0f * magnitude(x)) + 1.0f);
  const Words sign = bits<Words>(x) & 0x80000000u;
  return magnitude(x) < 0.625f ? near : bits<Floats>(bits<Words>(far) | sign);
}

// relu(x) - |x| * tail(|x|), where tail(u) = erfc(u / sqrt 2) / 2, avoids cancellation and
// division. The polynomial interpolates the tail at the 16 Chebyshev nodes of [0, 5.2]; beyond, the
// product is below 5e-7. Separate even and odd powers halve the dependency chain. It still is
// longer than a core looks ahead, so the steps of several vectors alternate.
template <int Vectors>
QFUSE_INLINE void gelu(Floats* x) {
  const float end = 5.2f;
  Floats t[Vectors], square[Vectors], odd[Vectors], even[Vectors];
  const auto each = [](const auto& f) QFUSE_LAMBDA { Unrolled<Vectors>::run(f); };
  each([&]<int V>() QFUSE_LAMBDA {
    t[V] = at_most(magnitude(x[V]), end) * (2.0f / end) - 1.0f;
    square[V] = t[V] * t[V];
    odd[V] = fused(square[V], -0.00365992785f, 0.0156297513f);
    even[V] = fused(square[V], 0.00562144329f, -0.0354597816f);
  });
  const auto step = [&](float of_odd, float of_even) QFUSE_LAMBDA {
    each([&]<int V>() QFUSE_LAMBDA {
      odd[V] = fused(odd[V], square[V], of_odd);
      even[V] = fused(even[V], square[V], of_even);
    });
  };
  step(-0.0123388047f, 0.0910099607f);
  step(-0.0657748272f, -0.0832254168f);
  step(0.190218767f, -0.104844293f);
  step(-0.109580931f, 0.252871639f);
  step(-0.229178247f, 0.11936532f);
  step(-0.0353157719f, 0.00466120233f);
  each([&]<int V>() QFUSE_LAMBDA {
    const Floats u = magnitude(x[V]);
    x[V] = at_least(x[V], 0.0f) - (u < end ? u * fused(odd[V], t[V], even[V]) : Floats{});
  });
}

// x / 2 * (1 + tanh u) is x / (1 + e^-2u), which does not cancel.
QFUSE_INLINE Floats gelu_tanh(Floats x) {
  const Floats u = 0.79788456f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-2.0f * u));
}

QFUSE_INLINE Floats quick_gelu(Floats x, float factor) {
  return x / (1.0f + exponential(-(x * factor)));
}

QFUSE_INLINE Floats elu(Floats x, float negative, float positive, float inner) {
  return x >= 0.0f ? x * positive : exponential_minus_one(x * inner) * negative;
}

// x * tanh(log(1 + e^x)) is x * n / (n + 2) with n = e^x * (e^x + 2). From x = 20 on the quotient is
// 1; below -87 it is less than float32 can hold.
QFUSE_INLINE Floats mish(Floats x) {
  const Floats e = exponential(at_most(x, 20.0f));
  const Floats n = x < -87.0f ? Floats{} : e * (e + 2.0f);
  return x * (n / (n + 2.0f));
}

QFUSE_INLINE Floats hardswish(Floats x) { return x * clamp(x + 3.0f, 0.0f, 6.0f) / 6.0f; }

QFUSE_INLINE Floats hardsigmoid(Floats x) { return clamp(x + 3.0f, 0.0f, 6.0f) / 6.0f; }

}  // namespace
