"""Activations written as arithmetic: ``x * sigmoid(x)``, ``x * (1 + erf(x / sqrt(2))) / 2``.

Numbers are matched exactly as they are computed with: a literal in float32, which is also where
operations on narrower types compute; a constant tensor in its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops.constants import number_of
from qfuse.ir.ops.views import dtype_of
from qfuse.rewrite.pattern import Capture, Either, Num, Pattern, Scalar, V, bind, op
from qfuse.rewrite.pattern.search import Mismatch
from qfuse.rewrite.pattern.writer import Writer
from qfuse.rewrite.prelude import MissCode, Node, OpOverload, aten

X = V("x", FLOATS)
"""The operand of the activation."""

LOW, HIGH = Num("low"), Num("high")
"""The bounds of two clamps."""


@dataclass(frozen=True, slots=True)
class ActivationCall:
    """A call of an activation on ``X``."""

    op: OpOverload
    settings: Mapping[str, Argument] = field(default_factory=dict)


CALL = Capture[ActivationCall]("call")
"""The op that computes what was matched."""


class Number(Pattern):
    """A literal or a constant of one element that is a given number, rounded to its dtype."""

    def __init__(self, value: float) -> None:
        self.value = value

    def read(self, value: object) -> object | Mismatch:
        """Compare after rounding."""
        known = number_of(value)
        if known is not None and _rounds_to(known, self.value, _dtype(value)):
            return value
        text = "expected the number {wanted}, found {found}"
        return Mismatch(MissCode.ARGUMENT, text, {"wanted": self.value})

    def show(self, out: Writer) -> None:
        """Write the number."""
        out.put(f"{self.value:.6g}")


def _dtype(value: object) -> torch.dtype:
    return dtype_of(value) if isinstance(value, Node) else torch.float32


def _rounds_to(known: float, wanted: float, dtype: torch.dtype) -> bool:
    # An integer enters the arithmetic as it is; only floats were rounded to something.
    if isinstance(known, int):
        return known == wanted
    rounded = torch.tensor((known, wanted), dtype=torch.float64).to(dtype)
    return bool(rounded[0] == rounded[1])


def _product(a: Pattern, b: Pattern, c: Pattern) -> Pattern:
    """Return the pattern of a product of three, in all orders."""
    return Either((a * b) * c, (a * c) * b, (b * c) * a)


def _scaled(value: Pattern, factor: float) -> Pattern:
    """Return the pattern of a product with a number, or a quotient by its inverse."""
    return Either(value * Number(factor), value / Number(1 / factor))


def _share(a: Pattern, b: Pattern, factor: float) -> Pattern:
    """Return the pattern of ``a * b * factor`` in all orders."""
    over = Number(1 / factor)
    quotients = ((a * b) / over, (a / over) * b, a * (b / over))
    return Either(_product(a, b, Number(factor)), *quotients)


_NEGATIVE = Either(op(aten.neg.default, X), X * Number(-1.0))
_DIVISOR = op(aten.exp.default, _NEGATIVE) + Number(1.0)
_SHIFTED = X + Number(3.0)
_CLAMPED = Either(
    op(aten.clamp.default, _SHIFTED, Number(0.0), Number(6.0)),
    op(aten.hardtanh.default, _SHIFTED, Number(0.0), Number(6.0)),
    op(aten.relu6.default, _SHIFTED),
)
_ERF = op(aten.erf.default, _scaled(X, math.sqrt(0.5)))
# log(1 + exp(x)), which torch computes without overflow.
_EXP = op(aten.exp.default, X)
_SOFTPLUS = Either(
    op(aten.softplus.default, X),
    op(aten.log1p.default, _EXP),
    op(aten.log.default, _EXP + Number(1.0)),
)
_SQUARE = Either(X * X, op(aten.pow.Tensor_Scalar, X, Number(2.0)))
_CUBE = Either(op(aten.pow.Tensor_Scalar, X, Number(3.0)), _SQUARE * X)
_CUBIC, _ROOT = Number(0.044715), Number(math.sqrt(2 / math.pi))
_TANH = op(
    aten.tanh.default,
    Either(
        (X + Either(_CUBE * _CUBIC, ((X * _CUBIC) * X) * X)) * _ROOT,
        # The same with x factored out.
        _product(X, Either(_product(X, X, _CUBIC), _SQUARE * _CUBIC) + Number(1.0), _ROOT),
    ),
)

SIGMOID = Either(
    op(aten.reciprocal.default, _DIVISOR),
    # `1 / tensor` is traced as the product of a reciprocal and 1.
    op(aten.sigmoid.default, X) * Number(1.0),
).given(bind(CALL, ActivationCall(aten.sigmoid.default)))
"""``1 / (1 + exp(-x))``."""

SILU = Either(X * op(aten.sigmoid.default, X), X / _DIVISOR).given(
    bind(CALL, ActivationCall(aten.silu.default))
)
"""``x * sigmoid(x)``, ``x / (1 + exp(-x))``."""

HARDSIGMOID = _scaled(_CLAMPED, 1 / 6).given(bind(CALL, ActivationCall(aten.hardsigmoid.default)))
"""``clamp(x + 3, 0, 6) / 6``."""

HARDSWISH = Either(X * op(aten.hardsigmoid.default, X), _share(X, _CLAMPED, 1 / 6)).given(
    bind(CALL, ActivationCall(aten.hardswish.default))
)
"""``x * clamp(x + 3, 0, 6) / 6``."""

GELU = _share(X, _ERF + Number(1.0), 0.5).given(bind(CALL, ActivationCall(aten.gelu.default)))
"""``x * 0.5 * (1 + erf(x / sqrt(2)))``."""

GELU_TANH = _share(X, _TANH + Number(1.0), 0.5).given(
    bind(CALL, ActivationCall(aten.gelu.default, {"approximate": "tanh"}))
)
"""``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``."""

MISH = (X * op(aten.tanh.default, _SOFTPLUS)).given(bind(CALL, ActivationCall(aten.mish.default)))
"""``x * tanh(log(1 + exp(x)))``."""

WRITTEN_OUT = Either(SIGMOID, SILU, HARDSIGMOID, HARDSWISH, GELU, GELU_TANH, MISH)
"""Any of these: ``X`` and ``CALL``."""


FACTOR = Scalar("factor")
"""The factor in the sigmoid of a quick GELU."""

GATE = Capture[Node]("gate")
"""The sigmoid of a quick GELU."""

QUICK_GELU = X * op(aten.sigmoid.default, X * FACTOR).named(GATE.label)
"""``x * sigmoid(1.702 * x)``, for which torch has no op: ``X``, ``FACTOR`` and ``GATE``."""


def _below(value: Pattern) -> Pattern:
    ops = op(aten.clamp_max.default, value, HIGH), op(aten.clamp.default, value, None, HIGH)
    return Either(*ops)


def _above(value: Pattern) -> Pattern:
    return Either(
        op(aten.relu.default, value).given(bind(LOW, 0.0)),
        op(aten.clamp_min.default, value, LOW),
        op(aten.clamp.default, value, LOW, None),
    )


TWO_CLAMPS = Either(_below(_above(X)), _above(_below(X)))
"""A clamp from below and one from above: ``X``, ``LOW`` and ``HIGH``."""
