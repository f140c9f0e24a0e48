"""Whether a rounded quotient may be NaN because its divisor may be zero."""

from __future__ import annotations

from collections.abc import Mapping

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value, number_of
from qfuse.ir.ops.views import node_of, result_of
from qfuse.normalize.match.views import view_source
from qfuse.rewrite.prelude import Node, arguments, aten

# Bounds the walk up from a zero point.
_DEPTH = 12
_UNARY = (
    aten.round.default,
    aten.floor.default,
    aten.ceil.default,
    aten.trunc.default,
    aten.neg.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
)
_SHIFTS = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar)


def may_divide_by_zero(node: Node) -> bool:
    """Whether ``node`` may be NaN for finite data: ``0 / 0``, or ``0 * (1 / 0)``.

    It looks through roundings, clamps, and sums with numbers, as in a zero point
    ``clamp(-128 - round(low / scale), -128, 127)``: where a row is zero, so is a scale without a
    least value.
    """
    for _ in range(_DEPTH):
        source = cast_source(node) or view_source(node)
        if source is None and is_call(node, *_UNARY):
            source = node_of(arguments(node)["self"])
        if source is None and is_call(node, *_SHIFTS):
            a = arguments(node)
            source = node_of(a["self"]) if number_of(a["other"]) is not None else None
        if source is None:
            break
        node = source
    if is_call(node, aten.div.Tensor):
        return not _is_positive(arguments(node)["other"], _DEPTH)
    if is_call(node, aten.mul.Tensor):
        factors = [
            f for f in (arguments(node)[k] for k in ("self", "other")) if isinstance(f, Node)
        ]
        return any(_is_inverse_of_zero(factor) for factor in factors)
    return False


def _is_inverse_of_zero(node: Node) -> bool:
    if is_call(node, aten.reciprocal.default):
        return not _is_positive(arguments(node)["self"], _DEPTH)
    return is_call(node, aten.div.Tensor) and not _is_positive(arguments(node)["other"], _DEPTH)


def _is_positive(value: object, depth: int) -> bool:
    """Whether a divisor is known to be greater than zero, for any finite data."""
    number = number_of(value)
    if number is not None or not isinstance(value, Node) or not depth:
        return number is not None and number > 0
    known = constant_value(value)
    if known is not None:
        return bool((known > 0).all())
    source = cast_source(value) or view_source(value)
    if source is not None:
        return _is_positive(source, depth - 1)
    return _is_positive_result(value, depth - 1)


def _is_positive_result(node: Node, depth: int) -> bool:
    """Whether an op returns what is greater than zero."""
    chosen = result_of(node)
    if chosen is not None:
        # Any library's op of that name has a least scale.
        return "choose_qparams" in str(chosen[0].target)
    a = arguments(node) if node.op == "call_function" else {}
    if is_call(node, aten.clamp.default, aten.clamp_min.default):
        least = number_of(a["min"])
        return least is not None and least > 0
    if is_call(node, aten.div.Tensor, aten.mul.Tensor):
        return all(_is_positive(a[name], depth) for name in ("self", "other"))
    # A number that is added to the width of an interval, which is not negative.
    if is_call(node, aten.add.Tensor, aten.maximum.default):
        return any(_is_positive(a[name], depth) for name in ("self", "other"))
    return is_call(node, aten.where.self) and _replaces_zeros(a, depth)


def _replaces_zeros(a: Mapping[str, object], depth: int) -> bool:
    """Whether it is ``where(scale == 0, positive, scale)``."""
    condition, scale = a["condition"], a["other"]
    if not isinstance(condition, Node) or not is_call(condition, aten.eq.Scalar):
        return False
    c = arguments(condition)
    if c["self"] is not scale or number_of(c["other"]) != 0:
        return False
    return _is_positive(a["self"], depth)
