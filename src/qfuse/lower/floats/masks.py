"""Masks of attention without the parts that allow everything."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.dtypes import exact_integers
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.view_ops import RESHAPES, TURNS
from qfuse.ir.ops.views import dtype_of, node_of, shape_of

_BOTH = (
    aten.__and__.Tensor,
    aten.bitwise_and.Tensor,
    aten.logical_and.default,
    aten.mul.Tensor,
)
_FILLS = (
    *(aten.ones.default, aten.new_ones.default, aten.ones_like.default),
    *(aten.full.default, aten.new_full.default, aten.full_like.default),
)
_SAME_VALUES = (
    *RESHAPES,
    *TURNS,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.alias.default,
    aten.clone.default,
)
# For each comparison with a number, which end of the range decides.
_COMPARISONS = {
    aten.ge.Scalar: (0, operator.ge),
    aten.gt.Scalar: (0, operator.gt),
    aten.le.Scalar: (1, operator.le),
    aten.lt.Scalar: (1, operator.lt),
}
# Bounds the search above a mask, in nodes.
_SEARCHED = 64
_LEAST_AXES = 2


def without_allowing_parts(mask: Node) -> Node:
    """Return a mask that broadcasts to the same values, with fewer elements if there is one.

    A mask is often expanded, or the conjunction of a mask of keys with a comparison that holds for
    all positions, such as ``arange(rows) >= 0``. Otherwise a mask of the size of a head's scores is
    computed for every call, though the kernel broadcasts in place.

    Args:
        mask: A mask that broadcasts to the scores. Masks of less than two axes are not returned.
    """
    while (simpler := _simpler(mask)) is not None:
        mask = simpler
    return mask


def _simpler(mask: Node) -> Node | None:
    if is_call(mask, aten.expand.default):
        source = node_of(arguments(mask)["self"])
        return source if len(shape_of(source)) >= _LEAST_AXES else None
    for kept, dropped in _parts_of(mask):
        if len(shape_of(kept)) >= _LEAST_AXES and _is_true(dropped):
            return kept
    return None


def _parts_of(mask: Node) -> tuple[tuple[Node, Node], ...]:
    """Return the operands of a conjunction in both orders; () of another op."""
    if not is_call(mask, *_BOTH):
        return ()
    a = arguments(mask)
    one, other = a["self"], a["other"]
    if not isinstance(one, Node) or not isinstance(other, Node):
        return ()
    bools = dtype_of(one) is torch.bool and dtype_of(other) is torch.bool
    return ((one, other), (other, one)) if bools else ()


def _is_true(mask: Node) -> bool:
    """Whether every element of a bool tensor is known to be true."""
    left, seen = [mask], {mask}
    while left:
        node = left.pop()
        if _is_filled_with_true(node) or _holds(node):
            continue
        above = [above for above in _operands_of(node) if dtype_of(above) is torch.bool]
        if not above or len(seen) > _SEARCHED:
            return False
        left += [node for node in above if node not in seen]
        seen.update(above)
    return True


def _operands_of(node: Node) -> tuple[Node, ...]:
    """Return operands that make ``node`` true where all of them are; () of another op."""
    if is_call(node, *_SAME_VALUES):
        return (node_of(arguments(node)["self"]),)
    return next(iter(_parts_of(node)), ())


def _is_filled_with_true(node: Node) -> bool:
    value = constant_value(node)
    if value is not None:
        return bool(value.all())
    return is_call(node, *_FILLS) and arguments(node).get("fill_value", True) is True


def _holds(comparison: Node) -> bool:
    """Whether a comparison of integers with a number is known to hold for all of them."""
    if not is_call(comparison, *_COMPARISONS):
        return False
    a = arguments(comparison)
    values, number = node_of(a["self"]), a["other"]
    if dtype_of(values).is_floating_point or not isinstance(number, int):
        return False
    # torch converts the number to the dtype of the values, where it may wrap.
    least, most = exact_integers(dtype_of(values))
    bounds = bounds_of(values)
    if bounds is None or not least <= number <= most:
        return False
    end, compare = next(how for op, how in _COMPARISONS.items() if is_call(comparison, op))
    return bool(compare(bounds[end], number))
