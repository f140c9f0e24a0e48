"""Where the scale and zero point of an integer product's activation go."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value, number_of
from qfuse.ir.ops.views import shape_of
from qfuse.ir.sizes import Size
from qfuse.normalize.importers.rule import RefusedError
from qfuse.normalize.match.broadcast import Spread, block_of, spread_of
from qfuse.normalize.match.constants import derived, shared_constant
from qfuse.normalize.match.quantized_values import integers_of, stored_spec
from qfuse.normalize.match.views import Path, put_back, rows_source, with_shape
from qfuse.rewrite.prelude import MissCode, Node, Rewriter, aten

_STEPS = 8
_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, slots=True)
class Activation:
    """Stored activations with parameters of their own rank.

    Attributes:
        q: The stored numbers.
        before: Views to put on ``q`` first, so that it has the rows of its scale.
        after: Views to put on what is made from its rows.
        scale: A node or number; ``None`` is 1.
        zero: A node or number; ``None`` is 0.
        rows: Whether there is one scale or zero point per row.
    """

    q: Node
    before: tuple[Node, ...]
    after: tuple[Node, ...]
    scale: Argument
    zero: Argument
    rows: bool

    def build(self, rw: Rewriter, real: torch.dtype) -> Node:
        """Return the dequantized activation of type ``real``."""
        q = self.q
        for view in self.before:
            q = put_back(rw, view, q)
        ones = (1,) * len(shape_of(q))
        zero = self._zero(rw, ones)
        # A number enters float64 arithmetic unrounded.
        compute = torch.float64 if real is torch.float64 else torch.float32
        scale = self._scale(rw, ones, zero, compute)
        if isinstance(self.zero, (int, float)) and zero is None:
            number = int(self.zero)
            zero = rw.call(aten.full_like.default, scale, number, dtype=torch.int32)
        shape, grid = shape_of(q), shape_of(scale)
        block = block_of(shape, grid)
        assert block is not None, f"a scale of shape {grid} does not tile {shape}"
        spec = stored_spec(self.q, shape, grid, real, block)
        return rw.call(ops.dequantize, q, scale, zero, str(spec))

    def _zero(self, rw: Rewriter, ones: tuple[int, ...]) -> Node | None:
        if isinstance(self.zero, Node):
            return self.zero if self.rows else _single(rw, self.zero, ones, "zero_point")
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
            return rw.call(aten.ones_like.default, zero, dtype=torch.float32)
        return shared_constant(rw, self.q, torch.ones(ones), f"one_of_rank_{len(ones)}")


def place(x: Node, scale: Argument, zero: Argument, y: Node, path: Path) -> Activation:
    """Find the view of an activation whose rows are those of its parameters.

    The parameters are stated for the shape that the activation had when it was quantized, and
    were then reshaped along with it. Going back up both chains of views finds that shape, the
    deepest where there are several; otherwise the activation is viewed in the rows of the scale.

    Args:
        x: Stored activation of shape ``[rows, K]``, as the product reads it.
        scale: Node, number or ``None``; it spreads over ``y``.
        zero: Node, number or ``None``; it spreads over ``x``.
        y: The scaled operand, of shape ``[.., N]``.
        path: What stands between the product and ``y``.

    Raises:
        RefusedError: The parameters are neither per row nor per tensor, or they do not fit.
    """
    zero = _integer(zero, y)
    has_scale_rows = _is_rows(scale, y)
    rows = has_scale_rows or _is_rows(zero, x)
    if not rows:
        q, after = list(_roots(x))[-1]
        return Activation(q, (), after, scale, zero, rows=False)
    if (has_scale_rows and isinstance(zero, Node) and not _is_rows(zero, x)) or (
        scale is not None and not has_scale_rows
    ):
        text = "scale and zero point have different blocks"
        raise RefusedError(MissCode.SHAPE, y, text)
    for q, after in reversed(list(_roots(x))):
        grid = (*shape_of(q)[:-1], 1)
        found = _in_shape(scale, grid), _in_shape(zero, grid)
        if found[0] is not _MISSING and found[1] is not _MISSING:
            return Activation(q, (), after, *found, rows=True)
    zero = _in_shape(zero, (*shape_of(y)[:-1], 1))
    if zero is _MISSING:
        text = "the zero point cannot be brought to the rows of the scale"
        raise RefusedError(MissCode.SHAPE, y, text)
    return Activation(x, path.views, (), scale, zero, rows=True)


def _integer(zero: Argument, y: Node) -> Argument:
    """Return an integer zero point, as a number if it is one number, without a cast to float.

    Raises:
        RefusedError: It is no integer, or not known to be one.
    """
    known = number_of(zero)
    if known is not None:
        if not math.isfinite(known) or known != int(known):
            raise RefusedError(MissCode.ZERO_POINT, y, "the zero point {} is no integer", known)
        if not _INT32.min <= known <= _INT32.max:
            raise RefusedError(MissCode.ZERO_POINT, y, "the zero point {} is no int32", known)
        return int(known)
    if not isinstance(zero, Node):
        return zero
    node = integers_of(zero)
    if node is None:
        raise RefusedError(MissCode.ZERO_POINT, y, "the zero point is not known to be an integer")
    return node


# What `_in_shape` returns if there is no such view; a string is no argument of these calls.
_MISSING = "no view of this shape"


def _in_shape(param: Argument, grid: tuple[Size, ...]) -> Argument:
    if not isinstance(param, Node):
        return param
    return with_shape(param, grid) or _MISSING


def _is_rows(param: Argument, value: Node) -> bool:
    """Whether ``param`` has an entry per row of ``value``.

    Raises:
        RefusedError: It spreads in another way than per row or per tensor.
    """
    if not isinstance(param, Node):
        return False
    spread = spread_of(shape_of(param), shape_of(value))
    if spread is Spread.ROWS:
        return True
    if spread is Spread.TENSOR:
        return False
    text = "a factor of shape {} on a result of shape {} is not one number per row"
    raise RefusedError(MissCode.AXIS, param, text, tuple(shape_of(param)), tuple(shape_of(value)))


def _roots(x: Node) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Give ``x`` and what it is a view of the rows of, with the views that lead back to ``x``."""
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
    value = constant_value(param)
    if value is not None:
        return derived(rw, param, value.reshape(ones), what)
    return rw.call(aten.view.default, param, list(ones))
