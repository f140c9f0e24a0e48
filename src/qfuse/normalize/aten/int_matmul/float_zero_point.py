"""A zero point of the activation that is corrected after the sums were scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.normalize.aten.int_matmul.match import EIGHT_BITS, IntProduct, column_sum
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.importers.rule import RefusedError
from qfuse.normalize.match.broadcast import Broadcast, broadcast_of, is_per_feature
from qfuse.normalize.match.constants import is_unit
from qfuse.normalize.match.quantized_values import keeps_integers
from qfuse.normalize.match.views import Path, strip_views, view_source, with_shape
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

_INTEGERS = (*EIGHT_BITS, torch.int16, torch.int32, torch.int64)
# Floats with the range of float32, or more.
_LARGE = (torch.float64, torch.float32, torch.bfloat16)
_FACTORS = 4
_STEPS = 8


@dataclass(frozen=True, slots=True)
class FloatZeroPointSite:
    """A linear on dequantized operands, and the correction that is subtracted from it."""

    node: Node
    linear: Linear
    act: Dequantize
    path: Path
    zero: Node


class FloatZeroPoint(Rule[FloatZeroPointSite]):
    """``linear(dequantize(x), w) - zero * scale * sum(w)`` gets the zero point into ``x``.

    Before::

        x -> qfuse.dequantize(scale) -> linear(w) -> view, cast --+
        zero -> cast -> mul(scale) -> mul(sum of w over K) -------+-> sub

    After::

        x -> qfuse.dequantize(scale, zero) -> linear(w) -> view, cast

    Rounding: the same value, without the cancellation of two large sums.

    Refuses: a correction whose factors are not just the zero point, the scales of both operands,
    and the sums of the stored weight over K; an activation that has a zero point; a zero point of
    other blocks than the scale; a linear that has a bias, or that others read.
    """

    name = "float-zero-point"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.sub.Tensor,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> FloatZeroPointSite | Miss:
        """Match the difference of such a linear and a product of several factors."""
        a = arguments(node)
        path, other = strip_views(a["self"]), _without_casts(a["other"])
        linear = None if path is None else as_linear(path.base)
        act = None if linear is None else as_dequantize(linear.x)
        weight = None if linear is None else as_dequantize(linear.weight)
        if (
            path is None
            or linear is None
            or act is None
            or not act.params.spec.is_plain
            or weight is None
            or not is_call(other, aten.mul.Tensor)
        ):
            text = "it is not the difference of a quantized linear and a product"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        try:
            return _read(node, path, linear, act, weight)
        except RefusedError as refused:
            return refused.miss

    def rewrite(self, site: FloatZeroPointSite, rw: Rewriter) -> None:
        """Dequantize with the zero point, and put back what stood between."""
        params = site.act.params
        x = rw.call(ops.dequantize, site.act.q, params.scale, site.zero, str(params.spec))
        y = call_linear(rw, x, site.linear.weight, like=site.linear.node)
        rw.replace(site.node, site.path.restore(rw, y, dtype_of(site.node)))


def _read(
    node: Node, path: Path, linear: Linear, act: Dequantize, weight: Dequantize
) -> FloatZeroPointSite:
    a = arguments(node)
    if a["alpha"] != 1:
        raise RefusedError(MissCode.ARGUMENT, node, "alpha={} scales the correction", a["alpha"])
    if act.params.zero_point is not None or weight.params.zero_point is not None:
        raise RefusedError(MissCode.ZERO_POINT, linear.node, "there is a zero point already")
    if linear.bias is not None:
        raise RefusedError(MissCode.ARGUMENT, linear.node, "the linear has a bias")
    if path.shared is not None:
        raise RefusedError(MissCode.SHARED, path.shared, "others read the uncorrected result too")
    if torch.float16 in path.dtypes:
        raise RefusedError(MissCode.DTYPE, node, "the uncorrected result passes through float16")
    y = a["self"]
    assert isinstance(y, Node), "it has a path"
    zero = _read_factors(_Factors(y, act, weight), a["other"])
    fitted = with_shape(zero, shape_of(act.params.scale))
    if fitted is None:
        text = "a zero point of shape {} has other blocks than the scale of shape {}"
        shapes = tuple(shape_of(zero)), tuple(shape_of(act.params.scale))
        raise RefusedError(MissCode.SHAPE, zero, text, *shapes)
    return FloatZeroPointSite(node, linear, act, path, fitted)


@dataclass(slots=True)
class _Factors:
    """The factors of a correction as they are found: each may occur once."""

    y: Node
    act: Dequantize
    weight: Dequantize
    zero: Node | None = None
    scaled: bool = False
    weight_scaled: bool = False
    summed: bool = False

    def take(self, factor: Node) -> None:
        """Say what ``factor`` is.

        Raises:
            RefusedError: It is none of the factors, or a second one of its kind.
        """
        w = self.weight
        product = IntProduct(self.y, self.act.q, None, w.q, rows=True)
        shape, mine = shape_of(self.y), shape_of(factor)
        root = _root(factor)
        spread = broadcast_of(mine, shape)
        # The sums first: for one output feature they have the shape of a factor for all.
        if not self.summed and is_per_feature(mine, shape) and column_sum(root, product):
            self.summed = True
        elif spread is Broadcast.CHANNEL:
            self._take_weight_scale(factor, root)
        elif spread in {Broadcast.ROWS, Broadcast.TENSOR}:
            self._take_row(factor, root)
        else:
            text = "a factor of shape {} is not part of a correction"
            raise RefusedError(MissCode.AXIS, factor, text, tuple(mine))

    def _take_weight_scale(self, factor: Node, root: Node) -> None:
        if self.weight_scaled or not _same_root(root, self.weight.params.scale):
            text = "a factor is neither the scale of the weight nor the sums of its stored numbers"
            raise RefusedError(MissCode.PATTERN, factor, text)
        self.weight_scaled = True

    def _take_row(self, factor: Node, root: Node) -> None:
        if not self.scaled and _same_root(root, self.act.params.scale):
            self.scaled = True
        elif self.zero is None and dtype_of(root) in _INTEGERS:
            self.zero = _integers(factor)
        else:
            text = "a factor is neither the scale of the activation nor a zero point"
            raise RefusedError(MissCode.PATTERN, factor, text)


def _read_factors(found: _Factors, correction: Argument) -> Node:
    """Return the zero point of ``zero * scale * weight_scale * sums``, in any order."""
    stack: list[Argument] = [correction]
    for _ in range(2 * _FACTORS):
        if not stack:
            break
        factor = stack.pop()
        inner = _without_casts(factor)
        if isinstance(inner, Node) and is_call(inner, aten.mul.Tensor):
            a = arguments(inner)
            stack += [a["self"], a["other"]]
        elif isinstance(factor, Node):
            found.take(factor)
        else:
            raise RefusedError(MissCode.PATTERN, found.y, "a factor is the number {}", factor)
    scaled = found.scaled or is_unit(found.act.params.scale)
    weight_scaled = found.weight_scaled or is_unit(found.weight.params.scale)
    if stack or found.zero is None or not (found.summed and scaled and weight_scaled):
        text = "the correction lacks a factor, or has one too many"
        raise RefusedError(MissCode.PATTERN, found.y, text)
    return found.zero


def _without_casts(value: Argument) -> Argument:
    """Look through casts between float types that widen or round, and do not overflow."""
    while isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor):
        source = cast_source(value)
        if source is None or not _only_rounds(dtype_of(source), dtype_of(value)):
            break
        value = source
    return value


def _integers(factor: Node) -> Node:
    """Look through the casts of an integer zero point, but not through its views."""
    node = factor
    while dtype_of(node).is_floating_point:
        source = cast_source(node) or view_source(node)
        assert source is not None, "its root is an integer"
        node = source
    return node


def _root(node: Node) -> Node:
    """Look through views and casts that at most round floats, and keep integers."""
    for _ in range(_STEPS):
        source = view_source(node)
        if source is None:
            source = cast_source(node)
            if source is None or not _keeps(source, dtype_of(node)):
                break
        node = source
    return node


def _keeps(source: Node, new: torch.dtype) -> bool:
    old = dtype_of(source)
    if old not in _INTEGERS:
        return _only_rounds(old, new)
    if new.is_floating_point:
        return keeps_integers(source, new)
    return new in _INTEGERS and torch.promote_types(old, new) == new


def _only_rounds(old: torch.dtype, new: torch.dtype) -> bool:
    return widens(old, new) or (old in _LARGE and new in _LARGE)


def _same_root(root: Node, scale: Node) -> bool:
    """Whether two nodes show the same numbers: the same node, or the same constant."""
    other = _root(scale)
    if root is other:
        return True
    return root.op == other.op == "get_attr" and root.target == other.target
