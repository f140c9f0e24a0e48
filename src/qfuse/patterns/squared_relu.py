"""Squares of a ReLU that are written without one: ``where(x <= 0, 0, x * x)``."""

from __future__ import annotations

import math

from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.constants import number_of
from qfuse.patterns.written_out import Number, X
from qfuse.rewrite.pattern import Capture, Either, Pattern, bind, op
from qfuse.rewrite.pattern.search import Mismatch
from qfuse.rewrite.pattern.writer import Writer
from qfuse.rewrite.prelude import MissCode, Node, aten

_ZEROS = (
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.zeros.default,
    aten.full_like.default,
    aten.full.default,
    aten.new_full.default,
)

KEEPS_NAN = Capture[bool]("keeps_nan")
"""Whether the result is NaN where ``X`` is."""


class Zero(Pattern):
    """A positive zero: a literal, a constant of one element, or a tensor of zeros."""

    def read(self, value: object) -> object | Mismatch:
        """Look at the value, or at the op that makes it."""
        known: object = number_of(value)
        if known is None and isinstance(value, Node) and is_call(value, *_ZEROS):
            known = arguments(value).get("fill_value", 0)
        if isinstance(known, (int, float)) and known == 0 and math.copysign(1, known) > 0:
            return value
        return Mismatch(MissCode.ARGUMENT, "expected 0, found {found}", {})

    def show(self, out: Writer) -> None:
        """Write the number."""
        out.put("0")


def _branches(condition: Pattern, one: Pattern, other: Pattern) -> Pattern:
    """Return the pattern of ``where`` with tensors, or a number, as branches."""
    ops = aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther
    return Either(*(op(each, condition, one, other) for each in ops))


def _square(value: Pattern) -> Pattern:
    powers = op(aten.pow.Tensor_Scalar, value, Number(2.0)), op(aten.square.default, value)
    return Either(*powers, value * value)


_POSITIVE = op((aten.gt.Scalar, aten.ge.Scalar), X, Number(0.0))
_NEGATIVE = op((aten.lt.Scalar, aten.le.Scalar), X, Number(0.0))
_RELU = Either(
    op(aten.relu.default, X),
    op(aten.clamp.default, X, Number(0.0), None),
    op(aten.clamp_min.default, X, Number(0.0)),
    op(aten.maximum.default, X, Zero()),
    op(aten.maximum.default, Zero(), X),
    op(aten.threshold.default, X, Number(0.0), Number(0.0)),
    op(aten.masked_fill.Scalar, X, _NEGATIVE, Number(0.0)),
    _branches(_NEGATIVE, Zero(), X),
)

# A comparison with NaN is false.
_DROPS_NAN = Either(
    _branches(_POSITIVE, _square(X), Zero()),
    _square(_branches(_POSITIVE, X, Zero())),
)

SQUARED_RELU = Either(
    Either(_branches(_NEGATIVE, Zero(), _square(X)), _square(_RELU)).given(bind(KEEPS_NAN, True)),
    _DROPS_NAN.given(bind(KEEPS_NAN, False)),
)
"""The square of ``X`` where that is positive, and 0 elsewhere: ``X`` and ``KEEPS_NAN``."""
