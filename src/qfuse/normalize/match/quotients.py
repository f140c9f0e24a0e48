"""Whether a rounded quotient may be NaN because its divisor may be zero."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value, number_of
from qfuse.ir.ops.views import dtype_of, node_of, result_of
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
_WHERE = (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther)


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
        return not _least(arguments(node)["other"], _DEPTH) > 0
    if is_call(node, aten.mul.Tensor):
        factors = [
            f for f in (arguments(node)[k] for k in ("self", "other")) if isinstance(f, Node)
        ]
        return any(_is_inverse_of_zero(factor) for factor in factors)
    return False


def least_of(value: object) -> float:
    """Return a positive lower bound of a number for any finite data; 0 if none is known."""
    return max(_least(value, _DEPTH), 0.0)


def _is_inverse_of_zero(node: Node) -> bool:
    a = arguments(node) if overload_of(node) is not None else {}
    if is_call(node, aten.reciprocal.default):
        return not _least(a["self"], _DEPTH) > 0
    return is_call(node, aten.div.Tensor) and not _least(a["other"], _DEPTH) > 0


def _least(value: object, depth: int) -> float:
    """Return a lower bound of a divisor for any finite data, as its dtype holds it; else 0.

    A bound of 1e-8 is 0 in float16.
    """
    number = number_of(value)
    if isinstance(value, Node) and is_call(value, aten.ones_like.default, aten.full_like.default):
        number = number_of(arguments(value).get("fill_value", 1))
    if number is not None or not isinstance(value, Node) or not depth:
        return 0.0 if number is None else float(number)
    known = constant_value(value)
    if known is not None:
        return float(known.min()) if known.numel() else 0.0
    source = cast_source(value) or view_source(value)
    bound = _least_result(value, depth - 1) if source is None else _least(source, depth - 1)
    return float(torch.tensor(bound, dtype=torch.float64).to(dtype_of(value)))


def _least_result(node: Node, depth: int) -> float:
    """Return a lower bound of what an op computes, before it is rounded to its dtype; else 0."""
    chosen = result_of(node)
    if chosen is not None:
        # Any library's op of that name has a least scale.
        return _smallest(node) if "choose_qparams" in str(chosen[0].target) else 0.0
    a = arguments(node) if overload_of(node) is not None else {}
    if is_call(node, aten.clamp.default, aten.clamp_min.default):
        least, most = number_of(a["min"]), number_of(a.get("max"))
        return min(least or 0.0, math.inf if most is None else most)
    if is_call(node, aten.div.Tensor, aten.mul.Tensor):
        by = number_of(a["other"]) or 0.0
        bound = _least(a["self"], depth)
        if by <= 0 or bound <= 0:
            return 0.0
        return bound / by if is_call(node, aten.div.Tensor) else bound * by
    # A number that is added to the width of an interval, which is not negative.
    if is_call(node, aten.add.Tensor, aten.maximum.default):
        return max(_least(a[name], depth) for name in ("self", "other"))
    other = _instead_of_zero(node, a)
    return 0.0 if other is None else min(_least(other, depth), _smallest(node))


def _smallest(node: Node) -> float:
    """Return the smallest positive number of the dtype of ``node``."""
    info = torch.finfo(dtype_of(node))
    return info.tiny * info.eps


def _instead_of_zero(node: Node, a: Mapping[str, object]) -> object:
    """Return ``other`` of ``where(scale == 0, other, scale)`` in its spellings, else ``None``."""
    if is_call(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        zeros, condition = True, a["mask"]
        other, scale = a["value"], a["self"]
    elif is_call(node, *_WHERE):
        condition = a["condition"]
        zeros = isinstance(condition, Node) and is_call(condition, aten.eq.Scalar)
        other, scale = (a["self"], a["other"]) if zeros else (a["other"], a["self"])
    else:
        return None
    tests = (aten.eq.Scalar,) if zeros else (aten.gt.Scalar, aten.ne.Scalar)
    if not isinstance(condition, Node) or not is_call(condition, *tests):
        return None
    c = arguments(condition)
    return other if c["self"] is scale and number_of(c["other"]) == 0 else None
