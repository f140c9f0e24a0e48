"""Activations written with two branches: ``where(x > 0, x, slope * x)``."""

from __future__ import annotations

import math

from qfuse.patterns.written_out import CALL, ActivationCall, Number, X
from qfuse.rewrite.pattern import Either, Pattern, Scalar, bind, guard, let, op
from qfuse.rewrite.prelude import MissCode, aten

SLOPE, ALPHA = Scalar("slope"), Scalar("alpha")
"""The factors of the negative branch."""


@guard(MissCode.ARGUMENT, "the slope {slope} is not finite")
def _has_finite_slope(slope: float) -> bool:
    return math.isfinite(slope)


@guard(MissCode.ARGUMENT, "the factor {alpha} is not finite")
def _has_finite_alpha(alpha: float) -> bool:
    return math.isfinite(alpha)


def _leaky(slope: float) -> ActivationCall:
    return ActivationCall(aten.leaky_relu.default, {"negative_slope": slope})


def _elu(alpha: float) -> ActivationCall:
    return ActivationCall(aten.elu.default, {"alpha": alpha})


def _signed(above: Pattern, below: Pattern) -> Pattern:
    """Return the pattern of ``above`` for positive and ``below`` for negative ``X``.

    The branches agree at 0, and both are NaN for NaN.
    """
    zero = Number(0.0)
    positive = op((aten.gt.Scalar, aten.ge.Scalar), X, zero)
    negative = op((aten.lt.Scalar, aten.le.Scalar), X, zero)
    return Either(
        op(aten.where.self, positive, above, below), op(aten.where.self, negative, below, above)
    )


_ZERO = Number(0.0)
# The greatest exponent may be bounded, since the branch is not taken above it.
_EXPONENT = Either(X, op(aten.clamp_max.default, X, _ZERO), op(aten.clamp.default, X, None, _ZERO))
_EXP = op(aten.exp.default, _EXPONENT)
_GROWTH = Either(op(aten.expm1.default, _EXPONENT), _EXP - Number(1.0), _EXP + Number(-1.0))

LEAKY_RELU = Either(_signed(X, X * SLOPE), op(aten.prelu.default, X, SLOPE)).given(
    _has_finite_slope, let(CALL, _leaky)
)
"""``where(x > 0, x, slope * x)``, and ``prelu`` with one slope."""

ELU = _signed(X, Either(_GROWTH * ALPHA, _GROWTH.given(bind(ALPHA, 1.0)))).given(
    _has_finite_alpha, let(CALL, _elu)
)
"""``where(x > 0, x, alpha * (exp(x) - 1))``."""

PIECEWISE = Either(LEAKY_RELU, ELU)
"""Any of these: ``X`` and ``CALL``."""
