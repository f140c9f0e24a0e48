"""Saturation to two bounds, however it is spelled, becomes one clamp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)

_LEAST = (aten.maximum.default, aten.max.other)
_MOST = (aten.minimum.default, aten.min.other)
_CLAMPS = (
    *(aten.clamp.default, aten.clamp.Tensor, aten.clip.default, aten.clip.Tensor),
    *(aten.clamp_min.default, aten.clamp_min.Tensor),
    *(aten.clamp_max.default, aten.clamp_max.Tensor),
    aten.hardtanh.default,
)
_WHERE = (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_ABOVE = (aten.gt.Scalar, aten.gt.Tensor, aten.ge.Scalar, aten.ge.Tensor)
_BELOW = (aten.lt.Scalar, aten.lt.Tensor, aten.le.Scalar, aten.le.Tensor)
_OR_EQUAL = (aten.ge.Scalar, aten.ge.Tensor, aten.le.Scalar, aten.le.Tensor)
_FILLED = (aten.full_like.default, aten.full.default)
_SHIFTS = (aten.add.Tensor, aten.sub.Tensor)


@dataclass(frozen=True, slots=True)
class Saturation:
    """A value between bounds.

    Attributes:
        node: What computes it.
        x: The value.
        low: The lower bound, or ``None``.
        high: The upper bound, or ``None``.
        signed: Whether a negative zero stays negative, as in a clamp.
    """

    node: Node
    x: Node
    low: float | None
    high: float | None
    signed: bool = True


class SpellSaturation(Rule[Saturation]):
    """``minimum(maximum(x, -128), 127)`` becomes ``clamp(x, -128, 127)``.

    Before::

        x -> maximum(low) -> minimum(high)

    After::

        x -> clamp(low, high)

    Likewise ``clip``, two clamps with one bound each, ``clamp`` by tensors, ``hardtanh`` of rounded
    values, and ``where`` or ``masked_fill`` where ``x`` is beyond a bound. All of them keep a NaN.

    Refuses: one bound only; bounds that are not integers, as those of quantized values are, or are
    computed at run time; bounds that cross; a result of another dtype or shape; a ``where`` that
    takes the bound for a NaN. ``maximum(x, 0)`` has a rule of its own, since it has no negative
    zero.
    """

    name = "spell-saturation"
    anchors: ClassVar[tuple[OpOverload, ...]] = (*_LEAST, *_MOST, *_CLAMPS, *_WHERE, *_FILLS)
    exactness = Exactness.EXACT
    keeps_sign: ClassVar[bool] = True

    def match(self, node: Node) -> Saturation | Miss:
        """Match a saturation to two integers that is not one clamp yet."""
        found = _saturation(node)
        if found is None or found.low is None or found.high is None:
            return _refusal(node)
        if not _is_spelled_otherwise(found):
            return Miss(MissCode.PATTERN, node, "it is one clamp, or an activation", progress=0)
        if found.signed is not self.keeps_sign or not (found.signed or _is_rounded(found.x)):
            return Miss(MissCode.PATTERN, node, "a negative zero may change", progress=0)
        if found.low > found.high:
            text = "the bounds {} and {} cross"
            return Miss(MissCode.RANGE, node, text, found.low, found.high)
        return found

    def rewrite(self, site: Saturation, rw: Rewriter) -> None:
        """Call the one op."""
        rw.replace(site.node, rw.call(aten.clamp.default, site.x, site.low, site.high))


class SpellSaturationAtZero(SpellSaturation):
    """``minimum(maximum(x, 0), 255)`` of rounded values becomes ``clamp(x, 0, 255)``.

    Before::

        x -> round -> maximum(0) -> minimum(255)

    After::

        x -> round -> clamp(0, 255)

    ``maximum`` may make a negative zero positive, and a clamp keeps it: the values are equal.

    Refuses: what :class:`SpellSaturation` refuses, and values that are not rounded.
    """

    name = "spell-saturation-at-zero"
    exactness = Exactness.ROUNDING
    keeps_sign: ClassVar[bool] = False


def _is_spelled_otherwise(found: Saturation) -> bool:
    """Whether a saturation of floats has yet to become a clamp, and is not an activation."""
    node, x = found.node, found.x
    if dtype_of(node) != dtype_of(x) or not same_shape(shape_of(node), shape_of(x)):
        return False
    if is_call(node, aten.hardtanh.default):
        return _is_rounded(x)
    one = is_call(node, aten.clamp.default) and x is arguments(node)["self"]
    return dtype_of(node).is_floating_point and not one


def _saturation(value: object) -> Saturation | None:
    """Return a value and its bounds, if a node saturates it; bounds that cross are given too."""
    outer = _one(value)
    inner = None if outer is None else _one(outer.x)
    if outer is None or inner is None:
        return outer
    if (outer.low is None, outer.high is None) != (inner.low is not None, inner.high is not None):
        # Not one bound each.
        return outer
    low = inner.low if outer.low is None else outer.low
    high = inner.high if outer.high is None else outer.high
    return Saturation(outer.node, inner.x, low, high, outer.signed and inner.signed)


def _one(value: object) -> Saturation | None:
    """Return the value and the bounds of one op."""
    if not isinstance(value, Node):
        return None
    if is_call(value, *_LEAST, *_MOST):
        return _extremum(value)
    if is_call(value, *_CLAMPS):
        a = arguments(value)
        x, low, high = (a.get(name) for name in ("self", "min", "max"))
        if is_call(value, aten.hardtanh.default):
            low, high = a["min_val"], a["max_val"]
        bounds = [None if bound is None else _bound(value, bound) for bound in (low, high)]
        given = [bound for bound in (low, high) if bound is not None]
        known = [bound for bound in bounds if bound is not None]
        if not isinstance(x, Node) or len(known) < len(given):
            return None
        return Saturation(value, x, bounds[0], bounds[1])
    return _chosen(value) if is_call(value, *_WHERE, *_FILLS) else None


def _extremum(value: Node) -> Saturation | None:
    a = arguments(value)
    for x, other in ((a["self"], a["other"]), (a["other"], a["self"])):
        bound = _bound(value, other)
        if bound is not None and isinstance(x, Node):
            below = is_call(value, *_LEAST)
            least, most = (bound, None) if below else (None, bound)
            return Saturation(value, x, least, most, signed=bound != 0)
    return None


def _chosen(value: Node) -> Saturation | None:
    """Return ``x`` and the bound that replaces it where it is beyond that bound."""
    a = arguments(value)
    fills = is_call(value, *_FILLS)
    test, bound = (a["mask"], a["value"]) if fills else (a["condition"], a["self"])
    rest = a["self"] if fills else a["other"]
    if not is_call(test, *_ABOVE, *_BELOW) or not isinstance(test, Node):
        return None
    compared = arguments(test)
    known = _bound(value, bound)
    if known is None or known != _bound(value, compared["other"]) or not isinstance(rest, Node):
        return None
    above = is_call(test, *_ABOVE)
    least, most = (None, known) if above else (known, None)
    # Where a negative zero is "beyond" a bound of 0, it becomes that bound.
    signed = known != 0 or not is_call(test, *_OR_EQUAL)
    found = Saturation(value, rest, least, most, signed)
    if compared["self"] is rest:
        return found
    # The test may read what the other bound replaces: with bounds in order it says the same.
    inner = _one(rest)
    if inner is None or compared["self"] is not inner.x:
        return None
    ordered = inner.low if above else inner.high
    other = inner.high if above else inner.low
    if ordered is None or other is not None:
        return None
    return found if (ordered <= known if above else known <= ordered) else None


def _refusal(node: Node) -> Miss:
    """Say why a node that does not saturate to two bounds is left."""
    if is_call(node, *_WHERE):
        a = arguments(node)
        test, bound = a["condition"], _bound(node, a["other"])
        if isinstance(test, Node) and is_call(test, *_ABOVE, *_BELOW) and bound is not None:
            compared = arguments(test)
            beyond = _bound(node, compared["other"]) == bound
            if beyond and compared["self"] is a["self"] and _is_rounded(a["self"]):
                text = "{} gives {} for a NaN, where a clamp keeps it"
                return Miss(MissCode.ARGUMENT, node, text, op_name(node), bound)
    return Miss(MissCode.PATTERN, node, "it does not saturate to two integers", progress=0)


def _bound(at: Node, value: object) -> float | None:
    """Return a bound that is an integer, and the same one for all elements."""
    if is_call(value, *_FILLED) and isinstance(value, Node):
        value = arguments(value)["fill_value"]
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        number = float(value)
    else:
        known = constant_value(value)
        if known is None or known.numel() == 0 or known.dtype is torch.bool:
            return None
        number = float(known.flatten()[0])
        if not bool((known == known.flatten()[0]).all()):
            return None
    exact = number.is_integer() and torch.tensor(number, dtype=dtype_of(at)).item() == number
    return number if exact else None


def _is_rounded(value: object) -> bool:
    """Whether a value is rounded, or the sum of such a one and another."""
    if is_call(value, *_SHIFTS) and isinstance(value, Node):
        value = arguments(value)["self"]
    return is_call(value, aten.round.default)
