"""Conversion of scales and zero points from a source's shape to one entry per block.

Sources have them as Python numbers, with one rank less, flat, or as columns. Here each becomes a
tensor in the rank of the data: a literal becomes a constant, a constant another constant, and a
tensor that is computed at run time is reshaped by views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.errors import BlockError
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.value_range import is_zero
from qfuse.ir.ops.view_ops import RESHAPES
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.sizes import Size, element_count, is_one, same_shape
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.rule import RefusedError
from qfuse.normalize.match.constants import derived
from qfuse.rewrite.prelude import MissCode, Node, Rewriter, arguments, aten


@dataclass(frozen=True, slots=True)
class Param:
    """A scale or zero point, and the shape and dtype that it needs.

    Attributes:
        source: The node that holds it, or the tensor itself if it was a literal.
        shape: One entry per block, in the rank of the data.
        dtype: Its dtype in the canonical op.
    """

    source: Node | torch.Tensor
    shape: tuple[Size, ...]
    dtype: torch.dtype

    def build(self, rw: Rewriter, hint: str) -> Node:
        """Return a node of this shape and dtype, made as cheaply as possible."""
        if isinstance(self.source, torch.Tensor):
            return rw.constant(self.source, hint)
        if same_shape(shape_of(self.source), self.shape) and dtype_of(self.source) == self.dtype:
            return self.source
        value = constant_value(self.source)
        if value is None:
            value = constant_of(self.source)  # Without values, it still has a shape to change.
        if value is not None:
            shape = [int(s) for s in self.shape]
            return derived(rw, self.source, value.reshape(shape).to(self.dtype), "grid")
        node = reshaped(rw, self.source, self.shape)
        if dtype_of(node) == self.dtype:
            return node
        return rw.call(aten._to_copy.default, node, dtype=self.dtype)


def literal(value: Argument, data: Node, dtype: torch.dtype) -> Param | None:
    """Return a Python number as one entry in the rank of ``data``; ``None`` for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    fake = tensor_of(data)
    shape = (1,) * fake.ndim
    return Param(torch.full(shape, value, dtype=dtype, device=fake.device), shape, dtype)


def fit(at: Node, param: Node, grid: Sequence[Size], what: str = "scale") -> Param:
    """Match ``param`` to the shape ``grid``, element by element in row-major order.

    Args:
        at: The source op that uses it.
        param: The tensor of the source.
        grid: The shape that the canonical op needs.
        what: Its name in errors.

    Raises:
        BlockError: It cannot fit, whatever the symbolic sizes are.
        RefusedError: It is not known whether it fits, or no view makes it fit.
    """
    node = without_reshapes(param, grid)
    have, want = shape_of(node), tuple(grid)
    done = Param(node, want, dtype_of(node))
    # Axes of size 1 may be anywhere, also beside symbolic sizes, whose product is unknown.
    if same_shape(have, want) or same_shape(_without_ones(have), _without_ones(want)):
        return done
    have_count, want_count = element_count(have), element_count(want)
    if have_count is None or want_count is None:
        text = "it is not known before run time whether the {} of shape {} fits in {}"
        raise RefusedError(MissCode.SHAPE, at, text, what, have, want)
    if have_count != want_count:
        raise cannot_run(
            at,
            f"a {what} of shape {tuple(shape_of(param))} does not fit: "
            f"{want_count} entries are needed, one per block, as in {want}",
            fix="give one entry per block of the data",
            kind=BlockError,
        )
    # A constant is reshaped at compile time, by a copy if necessary; at run time there are only
    # views.
    if constant_value(node) is None and not tensor_of(node).is_contiguous():
        text = "the {} of shape {} is not contiguous, so it has no view of shape {}"
        raise RefusedError(MissCode.SHAPE, at, text, what, have, want)
    return done


def fit_zero_point(at: Node, param: Node | None, grid: Sequence[Size]) -> Param | None:
    """Match a zero point; one that is a known zero everywhere becomes ``None``.

    Raises:
        BlockError: It cannot fit, whatever the symbolic sizes are.
        RefusedError: It is not known whether it fits, or no view makes it fit.
    """
    if param is None:
        return None
    fitted = fit(at, param, grid, "zero point")
    # Sources with symmetric quantization pass tensors of zeros; without them specs and kernels are
    # simpler, and adding zero changes nothing.
    return None if is_zero(param) else fitted


def check_float(scale: Node) -> None:
    """Check that a scale has a float dtype.

    Raises:
        RefusedError: It has another dtype.
    """
    if not dtype_of(scale).is_floating_point:
        text = "the scale is {}"
        raise RefusedError(MissCode.DTYPE, scale, text, dtype_name(dtype_of(scale)))


def without_reshapes(node: Node, shape: Sequence[Size]) -> Node:
    """Return the node above the reshapes that already has ``shape``, or ``node``."""
    seen = node
    while not same_shape(shape_of(seen), shape):
        if not is_call(seen, *RESHAPES):
            return node
        seen = node_of(arguments(seen)["self"])
    return seen


def reshaped(rw: Rewriter, node: Node, shape: Sequence[Size]) -> Node:
    """Return the elements of ``node`` in ``shape``, which :func:`fit` has checked."""
    if same_shape(shape_of(node), shape):
        return node
    static = [s for s in shape if isinstance(s, int)]
    if len(static) == len(shape):
        return rw.call(aten.view.default, node, static)
    # A symbolic size would need a node of its own; dropping and adding axes of size 1 needs no
    # sizes.
    ones = [axis for axis, size in enumerate(shape_of(node)) if is_one(size)]
    if ones:
        node = rw.call(aten.squeeze.dims, node, ones)
    for axis, size in enumerate(shape):
        if is_one(size):
            node = rw.call(aten.unsqueeze.default, node, axis)
    return node


def _without_ones(shape: Sequence[Size]) -> tuple[Size, ...]:
    return tuple(s for s in shape if not is_one(s))
