"""A zero point correction in float: ``zero * x_scale * weight_scale * sum(weight)``."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES, widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.normalize.aten.int_matmul.activation import ActivationOperand
from qfuse.normalize.aten.int_matmul.products import is_column_sum
from qfuse.normalize.aten.int_matmul.weight import Weight
from qfuse.normalize.aten.qdq.scale_factor import Factor
from qfuse.normalize.match.broadcast import Broadcast, broadcast_of, is_per_feature
from qfuse.normalize.match.quantized_values import integers_of, keeps_integers
from qfuse.normalize.match.views import VIEW, view_source
from qfuse.rewrite.pattern import Match, Step, V, match, through
from qfuse.rewrite.pattern.base import is_tensor
from qfuse.rewrite.pattern.search import same_value
from qfuse.rewrite.prelude import Miss, MissCode, Node, arguments, aten

_INTEGERS = (*BYTES, torch.int16, torch.int32, torch.int64)
# Float dtypes with the range of float32, or more.
_LARGE = (torch.float64, torch.float32, torch.bfloat16)
# A correction has four factors; more nested products than this cannot be one.
_FACTORS = 8


def _rounded(node: Node) -> Node | None:
    """Look through a cast between float dtypes that widens or rounds, and does not overflow."""
    source = cast_source(node)
    return source if source is not None and _only_rounds(source, dtype_of(node)) else None


def _kept(node: Node) -> Node | None:
    """Look through a cast that at most rounds floats, and keeps integers."""
    source, new = cast_source(node), dtype_of(node)
    if source is None or (old := dtype_of(source)) not in _INTEGERS:
        return _rounded(node)
    if new.is_floating_point:
        return source if keeps_integers(source, new) else None
    # A narrowing cast wraps: an int32 zero point of 300 would be 44 as int8.
    return source if new in _INTEGERS and torch.promote_types(old, new) == new else None


def _only_rounds(source: Node, new: torch.dtype) -> bool:
    old = dtype_of(source)
    return widens(old, new) or (old in _LARGE and new in _LARGE)


_ROOT = V("root")
_BEHIND_FLOAT_CASTS = through(_ROOT, Step("cast", _rounded))
_BEHIND_ALL = through(_ROOT, VIEW, Step("cast", _kept))


def multiplied(value: Argument) -> tuple[Argument, Argument] | None:
    """Return the factors of a product behind casts that at most round."""
    found = match(_BEHIND_FLOAT_CASTS, value) if is_tensor(value) else None
    if not isinstance(found, Match) or not is_call(found[_ROOT], aten.mul.Tensor):
        return None
    a = arguments(found[_ROOT])
    return a["self"], a["other"]


def read_zero(y: Node, correction: Argument, x: ActivationOperand, weight: Weight) -> Node | Miss:
    """Return the zero point of ``zero * x_scale * weight_scale * sums``, in any order.

    A scale that is 1 may be absent.

    Args:
        y: The minuend of the correction.
        correction: The product.
        x: The activation.
        weight: The weight.
    """
    found: dict[str, Node] = {}
    for factor in _factors(correction):
        if not isinstance(factor, Node) or not is_tensor(factor):
            return Miss(MissCode.PATTERN, y, "a factor is the number {}", factor)
        kind = _kind(factor, y, x, weight, found)
        if isinstance(kind, Miss):
            return kind
        found[kind] = factor
    # A correction without one of the scales, or with a scale that the product does not have, has
    # another value than zero point times sums.
    wanted = {"zero", "sums"}
    wanted |= {"x_scale"} if x.is_scaled else set()
    wanted |= {"weight_scale"} if weight.is_scaled else set()
    if not wanted <= found.keys():
        return Miss(MissCode.PATTERN, y, "the correction lacks a factor, or has one too many")
    return _integers(found["zero"])


def _factors(correction: Argument) -> list[Argument]:
    found: list[Argument] = []
    stack = [correction]
    while stack:
        factor = stack.pop()
        parts = multiplied(factor) if len(stack) + len(found) < _FACTORS else None
        if parts is None:
            found.append(factor)
        else:
            stack += parts
    return found


def _kind(
    factor: Node, y: Node, x: ActivationOperand, weight: Weight, found: dict[str, Node]
) -> str | Miss:
    """Classify a factor: each kind may occur once."""
    root, shape, mine = _root(factor), shape_of(y), shape_of(factor)
    spread = broadcast_of(mine, shape)
    assert weight.q is not None, "the weight is quantized"
    # The sums first: with one output feature they have the shape of a scalar factor.
    per_feature = "sums" not in found and is_per_feature(mine, shape)
    if per_feature and is_column_sum(root, weight.q, rows=weight.rows):
        return "sums"
    if spread is None:
        text = "a factor of shape {} is not part of a correction"
        return Miss(MissCode.AXIS, factor, text, tuple(mine))
    on_weight = spread is Broadcast.CHANNEL
    kind, scale = ("weight_scale", weight.scale) if on_weight else ("x_scale", x.scale)
    if kind not in found and _is_scale(root, scale):
        return kind
    if not on_weight and "zero" not in found and _is_zero_point(root):
        return "zero"
    text = "a factor is neither a zero point, a scale, nor the sums of the weight, or occurs twice"
    return Miss(MissCode.PATTERN, factor, text)


def _is_zero_point(root: Node) -> bool:
    return dtype_of(root) in _INTEGERS or integers_of(root) is root


def _is_scale(root: Node, scale: Argument | Factor) -> bool:
    """Whether two nodes have the same values: the same node, or the same constant."""
    home = scale.home if isinstance(scale, Factor) else scale
    return isinstance(home, Node) and same_value(root, _root(home))


def _root(node: Node) -> Node:
    found = match(_BEHIND_ALL, node)
    assert isinstance(found, Match), "any tensor matches"
    return found[_ROOT]


def _integers(factor: Node) -> Node:
    """Look through the casts of an integer zero point, but not through its views."""
    node = factor
    # Views of the integers stay: the caller picks the one that has the shape of the scale.
    while dtype_of(node).is_floating_point and integers_of(node) is not node:
        source = cast_source(node) or view_source(node)
        assert source is not None, "its root is an integer"
        node = source
    return node
