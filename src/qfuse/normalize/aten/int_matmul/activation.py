"""The scale and zero point of a product's activation, and the view to which they apply."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value, number_of
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import QuantSpec, dtype_name, dtype_range
from qfuse.ir.sizes import Size
from qfuse.normalize.match.broadcast import Broadcast, block_of, broadcast_of
from qfuse.normalize.match.constants import derived, is_unit, shared_constant, unit_scale
from qfuse.normalize.match.quantized_values import (
    as_integers,
    integers_of,
    spec_of_dequantize,
)
from qfuse.normalize.match.views import reapply_views, rows_source, with_shape
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter, aten

_STEPS = 8
_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, slots=True)
class ActivationOperand:
    """Quantized activations with parameters of their own rank.

    Attributes:
        q: The quantized values.
        scale: A node or number; ``None`` is 1.
        zero: A node or number; ``None`` is 0.
        spec: The spec of its dequantize; ``None`` if it is not dequantized yet.
        before: Views to apply to ``q`` first, so that it has the rows of its scale.
        after: Views to apply to the result.
        rows: Whether there is one scale or zero point per row.
    """

    q: Node
    scale: Argument
    zero: Argument
    spec: QuantSpec | None = None
    before: tuple[Node, ...] = ()
    after: tuple[Node, ...] = ()
    rows: bool = False

    @property
    def is_scaled(self) -> bool:
        """Whether there is a scale other than 1."""
        known = number_of(self.scale) if not isinstance(self.scale, Node) else None
        return self.scale is not None and not (
            known == 1 or (isinstance(self.scale, Node) and is_unit(self.scale))
        )

    @property
    def grid(self) -> tuple[Size, ...]:
        """The shape that a zero point must have."""
        if self.spec is not None or self.rows:
            param = self.scale if isinstance(self.scale, Node) else self.zero
            assert isinstance(param, Node), "a parameter has rows"
            return tuple(shape_of(param))
        return (1,) * len(shape_of(self.q))

    def build(self, rw: Rewriter, float_dtype: torch.dtype) -> Node:
        """Return the dequantized activation of dtype ``float_dtype``."""
        if self.spec is not None:
            zero = as_integers(rw, self.zero) if isinstance(self.zero, Node) else self.zero
            return rw.call(ops.dequantize, self.q, self.scale, zero, str(self.spec))
        q = self.q
        for view in self.before:
            q = reapply_views(rw, view, q)
        ones = (1,) * len(shape_of(q))
        zero = self._zero(rw, ones)
        # A Python number is not rounded in float64 arithmetic.
        compute = torch.float64 if float_dtype is torch.float64 else torch.float32
        scale = self._scale(rw, ones, zero, compute)
        # The scales are per row, so a single number is expanded to their shape.
        if isinstance(self.zero, (int, float)) and zero is None:
            number = int(self.zero)
            zero = rw.call(aten.full_like.default, scale, number, dtype=torch.int32)
        shape, grid = shape_of(q), shape_of(scale)
        block = block_of(shape, grid)
        assert block is not None, f"a scale of shape {grid} does not tile {shape}"
        spec = spec_of_dequantize(self.q, shape, grid, float_dtype, block)
        return rw.call(ops.dequantize, q, scale, zero, str(spec))

    def _zero(self, rw: Rewriter, ones: tuple[int, ...]) -> Node | None:
        if isinstance(self.zero, Node):
            zero = as_integers(rw, self.zero)
            return zero if self.rows else _single(rw, zero, ones, "zero_point")
        if isinstance(self.zero, (int, float)) and not self.rows:
            value = torch.full(ones, int(self.zero), dtype=torch.int32)
            return shared_constant(rw, self.q, value, f"{self.q.name}_zero_point")
        return None

    def _scale(
        self, rw: Rewriter, ones: tuple[int, ...], zero: Node | None, compute: torch.dtype
    ) -> Node:
        if isinstance(self.scale, Node):
            return self.scale if self.rows else _single(rw, self.scale, ones, "scale")
        if isinstance(self.scale, (int, float)):
            value = torch.full(ones, float(self.scale), dtype=compute)
            return shared_constant(rw, self.q, value, f"{self.q.name}_scale")
        if self.rows and zero is not None:
            # The zero points are per row, so the scale 1 is expanded to their shape.
            return rw.call(aten.ones_like.default, zero, dtype=torch.float32)
        return unit_scale(rw, self.q, len(ones))


def place(
    x: Node, scale: Argument, zero: Argument, y: Node, views: tuple[Node, ...]
) -> ActivationOperand | Miss:
    """Return the view of an activation whose rows are those of its parameters.

    The parameters have the shape that the activation had when it was quantized; both were then
    reshaped. Going back up both chains of views finds that shape, the one furthest up if there are
    several; otherwise the activation is viewed in the rows of the scale.

    Args:
        x: Quantized activation of shape ``[rows, K]``, the operand of the product.
        scale: Node, number or ``None``; it broadcasts over ``y``.
        zero: Node, number or ``None``; it broadcasts over ``x``.
        y: The scaled operand, of shape ``[.., N]``.
        views: The views between the product and ``y``.
    """
    integer = _integer(zero, y)
    spreads = _spread(scale, y), _spread(zero if isinstance(integer, Miss) else integer, x)
    refusal = next((found for found in (integer, *spreads) if isinstance(found, Miss)), None)
    if refusal is not None:
        return refusal
    assert not isinstance(integer, Miss), "a miss was returned above"
    zero = integer
    scale_rows, zero_rows = (spread is Broadcast.ROWS for spread in spreads)
    # One number for the whole tensor is right in any shape, so this takes the tensor furthest up,
    # the one that was quantized.
    if not scale_rows and not zero_rows:
        q, after = list(_roots(x))[-1]
        return ActivationOperand(q, scale, zero, after=after)
    # A dequantize has one block for both parameters. `build` expands a zero point that is a number
    # and a scale of 1 to the rows of the other one; any other pair would need ops at run time.
    if (isinstance(zero, Node) and not zero_rows) or (scale is not None and not scale_rows):
        return Miss(MissCode.SHAPE, y, "scale and zero point have different blocks")
    # From the top, so that the activation has the shape in which it was quantized.
    for q, after in reversed(list(_roots(x))):
        grid = (*shape_of(q)[:-1], 1)
        found = _in_shape(scale, grid), _in_shape(zero, grid)
        if found[0] is not _MISSING and found[1] is not _MISSING:
            return ActivationOperand(q, *found, after=after, rows=True)
    # No value above has the rows of the scale, so the activation gets the views of the result.
    zero = _in_shape(zero, (*shape_of(y)[:-1], 1))
    if zero is _MISSING:
        text = "the zero point cannot be viewed in the rows of the scale"
        return Miss(MissCode.SHAPE, y, text)
    return ActivationOperand(x, scale, zero, before=views, rows=True)


def refuse_outside(at: Node, x: Node, zero: Argument) -> Miss | None:
    """Refuse a zero point that may lie outside of the range of ``x``.

    Kernels hold it in that dtype, so such a product would be computed in float.
    """
    known = number_of(zero)
    bounds = None if known is None or not math.isfinite(known) else (int(known), int(known))
    if bounds is None and isinstance(zero, Node):
        bounds = bounds_of(zero)
    low, high = dtype_range(dtype_of(x))
    if zero is None or (bounds is not None and low <= bounds[0] and bounds[1] <= high):
        return None
    text = "the zero point may lie outside [{}, {}], the range of {}: clamp it"
    return Miss(MissCode.ZERO_POINT, at, text, low, high, dtype_name(dtype_of(x)))


def _integer(zero: Argument, y: Node) -> Argument | Miss:
    """Return an integer zero point without a cast to float; as a number if it is one number."""
    known = number_of(zero)
    if known is not None:
        if not math.isfinite(known) or known != int(known):
            return Miss(MissCode.ZERO_POINT, y, "the zero point {} is not an integer", known)
        # `build` stores it as int32, where a larger number would wrap.
        if not _INT32.min <= known <= _INT32.max:
            return Miss(MissCode.ZERO_POINT, y, "the zero point {} is not an int32", known)
        return int(known)
    if not isinstance(zero, Node):
        return zero
    text = "the zero point is not known to be an integer"
    return integers_of(zero) or Miss(MissCode.ZERO_POINT, y, text)


# `_in_shape` returns this if there is no such view; no argument of these calls is a string.
_MISSING = "no view of this shape"


def _in_shape(param: Argument, grid: tuple[Size, ...]) -> Argument:
    if not isinstance(param, Node):
        return param
    return with_shape(param, grid) or _MISSING


def _spread(param: Argument, value: Node) -> Broadcast | Miss:
    """Return whether ``param`` has an entry per row of ``value``, or one for all."""
    if not isinstance(param, Node):
        return Broadcast.TENSOR
    spread = broadcast_of(shape_of(param), shape_of(value))
    if spread in {Broadcast.ROWS, Broadcast.TENSOR}:
        return spread
    text = "a factor of shape {} on a result of shape {} is not one number per row"
    return Miss(MissCode.AXIS, param, text, tuple(shape_of(param)), tuple(shape_of(value)))


def _roots(x: Node) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Yield ``x`` and the values that it is a view of the rows of, with the views back to ``x``."""
    node: Node | None = x
    views: tuple[Node, ...] = ()
    for _ in range(_STEPS):
        if node is None:
            return
        yield node, views
        source = rows_source(node)
        if source is not None:
            views = (node, *views)
        node = source


def _single(rw: Rewriter, param: Node, ones: tuple[int, ...], what: str) -> Node:
    """Return a parameter of one element in the rank of the activation."""
    found = with_shape(param, ones)
    if found is not None:
        return found
    # A constant is reshaped at compile time.
    value = constant_value(param)
    if value is not None:
        return derived(rw, param, value.reshape(ones), what)
    return rw.call(aten.view.default, param, list(ones))
