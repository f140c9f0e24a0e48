"""Multiply the result of a product by a factor, instead of a quantized operand."""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.movement.base import Moved, Movement
from qfuse.ir.ops.matmul import MATMULS, Matmul, as_matmul
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import is_one, same_shape
from qfuse.optimize.match.move_qparams import GraphMover, movement_name
from qfuse.patterns.quantized_operand import (
    Scaling,
    is_quantized_activation,
    moved_operand,
    reapply_movements,
    scalings,
)
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    aten,
)

_MATRIX = 2
# Products stay far from the ends of the range of float32.
_LEAST, _MOST = 2.0**-64, 2.0**64
# The values that are multiplied by a factor below 1 may be in range only after that.
_WIDE = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class FactorSite:
    """A product, one operand of which is multiplied or divided by a factor.

    Attributes:
        product: The product.
        side: The argument that is scaled.
        movements: What moves the scaled operand before the product, from the last to the first.
        scaling: The multiplication or division.
        moved: What the movements do to a factor with several values.
    """

    product: Matmul
    side: str
    movements: tuple[Movement, ...]
    scaling: Scaling
    moved: tuple[Moved, ...] = ()


class _SinkFactor(Rule[FactorSite], ABC):
    anchors: ClassVar[tuple[OpOverload, ...]] = MATMULS

    def match(self, node: Node) -> FactorSite | Miss:
        """Match a product of two activations that are quantized, one of which is scaled."""
        product = as_matmul(node)
        assert product is not None, "the anchor is a product"
        sides = {"x": product.x, "other": product.other}
        sites = [_site(product, side, operand) for side, operand in sides.items()]
        site = next((found for found in sites if found is not None), None)
        # Of the two rules, only one looks at both operands.
        if site is not None and _is_exact(site) is not (self.exactness is Exactness.EXACT):
            return Miss(MissCode.ARGUMENT, node, "another rule sinks the factor", progress=0)
        if site is None or not all(map(is_quantized_activation, sides.values())):
            text = "no quantized operand is multiplied by a factor"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        wrong = _refuse_factor(site)
        if wrong is not None or not _varies(site):
            return wrong or site
        moved = _moved_down(site)
        return moved if isinstance(moved, Miss) else replace(site, moved=moved)

    def rewrite(self, site: FactorSite, rw: Rewriter) -> None:
        """Multiply the operands as they are, and scale the result."""
        product = site.product
        scaling = site.scaling
        value = reapply_movements(rw, site.movements, scaling.source)
        operands = [value, product.other] if site.side == "x" else [product.x, value]
        op, scale = overload_of(product.node), overload_of(scaling.node)
        assert op is not None, "a product is a call"
        assert scale is not None, "a multiplication is a call"
        made = rw.call(op, *operands)
        factor = _moved_factor(site, rw) if site.moved else scaling.factor
        rw.replace(product.node, rw.call(scale, made, factor))


class SinkFactor(_SinkFactor):
    """``(dequantize(q) * c) @ dequantize(k)`` becomes ``(dequantize(q) @ dequantize(k)) * c``.

    Before::

        q -> dequantize -> mul(c) --.
        k -> dequantize ------------+-> matmul

    After::

        q -> dequantize --.
        k -> dequantize --+-> matmul -> mul(c)

    The product is then fused with both dequantizes, and the factor into its epilogue. The same for
    the right operand, for a quotient, and for a factor above views and transposes, with which it
    moves. ``c`` is a number or a tensor, constant or not, with one number per row of the left
    operand or column of the right one.

    Rounding: the result is rounded before the factor instead of the operand after it.

    Refuses: a factor that varies along the axis that is summed, or a constant that is not finite;
    float16, in which the result may overflow before it is scaled.
    """

    name = "sink-factor"
    exactness = Exactness.ROUNDING


class SinkPowerOfTwo(_SinkFactor):
    """The same as ``sink-factor`` for a power of two, which changes no bits.

    Before::

        q -> dequantize -> mul(0.125) --.
        k -> dequantize ----------------+-> matmul

    After::

        q -> dequantize --.
        k -> dequantize --+-> matmul -> mul(0.125)

    Refuses: what ``sink-factor`` refuses.
    """

    name = "sink-power-of-two"
    exactness = Exactness.EXACT


def _site(product: Matmul, side: str, operand: Node) -> FactorSite | None:
    """View an operand as a quantized value with a factor below movements."""
    movements, node = moved_operand(operand)
    if as_dequantize(node) is not None:
        return None
    for scaling in scalings(node):
        # Either of two values that are computed at run time may be the factor.
        if is_quantized_activation(scaling.source):
            return FactorSite(product, side, movements, scaling)
    return None


def _moved_factor(site: FactorSite, rw: Rewriter) -> Node:
    """Apply the movements to a factor with several values."""
    scaling, mover = site.scaling, GraphMover(rw)
    missing = len(shape_of(scaling.node)) - len(scaling.shape)
    moved: Any = scaling.factor if scaling.value is None else scaling.value
    for _ in range(missing):
        moved = mover.call(aten.unsqueeze.default, moved, 0)
    for step in site.moved:
        moved = step.apply(mover, moved)
    # A constant is stored densely, not as a view of the old one.
    dense = moved.contiguous() if isinstance(moved, torch.Tensor) else moved
    return mover.node(dense, "factor")


def _is_exact(site: FactorSite) -> bool:
    value = site.scaling.value
    if value is None or value.numel() != 1:
        return False
    number = float(value)
    # The mantissa of a power of two.
    return abs(math.frexp(number)[0]) == 0.5 and _LEAST <= abs(number) <= _MOST  # noqa: PLR2004


def _refuse_factor(site: FactorSite) -> Miss | None:
    scaling = site.scaling
    node, value, source = scaling.node, scaling.value, scaling.source
    shapes = shape_of(site.product.x), shape_of(site.product.other)
    if min(map(len, shapes)) < _MATRIX:
        text = "a product of shapes {} and {} has an operand of one axis"
        return Miss(MissCode.SHAPE, site.product.node, text, *map(tuple, shapes), progress=2)
    if value is not None and (value.dtype is torch.bool or value.is_complex()):
        return Miss(MissCode.DTYPE, node, "a constant of {}", value.dtype, progress=2)
    real = dtype_of(node)
    if real not in _WIDE or dtype_of(source) != real:
        text = "it is computed in {}, and its operand is {}"
        return Miss(MissCode.DTYPE, node, text, real, dtype_of(source), progress=2)
    if value is not None:
        finite = value.isfinite() & ((value != 0) | is_call(node, aten.mul.Tensor))
        if not bool(finite.all()):
            text = "the constant is not finite, or divides by 0"
            return Miss(MissCode.RANGE, node, text, progress=2)
    return _refuse_shape(site)


def _refuse_shape(site: FactorSite) -> Miss | None:
    """Refuse a factor that does not apply to whole rows of the left or columns of the right."""
    scaling, shape = site.scaling, site.scaling.shape
    if not same_shape(shape_of(scaling.node), shape_of(scaling.source)):
        text = "it broadcasts its operand of shape {}"
        return Miss(MissCode.SHAPE, scaling.node, text, tuple(shape_of(scaling.source)), progress=2)
    # A tensor of one element with more axes than the result would add axes to that.
    fits = len(shape) <= len(shape_of(site.product.node))
    if scaling.is_one_number and fits:
        return None
    if _varies(site):
        return None
    summed = _summed(site)
    along = shape[summed] if len(shape) >= -summed else 1
    return _refuse_axis(site) if not is_one(along) or not fits else None


def _summed(site: FactorSite) -> int:
    """Return the axis of the operand that the product sums over."""
    return -1 if site.side == "x" else -_MATRIX


def _refuse_axis(site: FactorSite) -> Miss:
    text = "a factor of shape {} is not one number per row or column of the result"
    return Miss(MissCode.AXIS, site.scaling.node, text, site.scaling.shape, progress=2)


def _varies(site: FactorSite) -> bool:
    """Whether the factor has several values, which movements permute."""
    return bool(site.movements) and not site.scaling.is_one_number


def _moved_down(site: FactorSite) -> tuple[Moved, ...] | Miss:
    """Move a factor like the scale of a dequantize: one value for each element, or for an axis."""
    scaling = site.scaling
    shape = (*(1,) * (len(shape_of(scaling.node)) - len(scaling.shape)), *scaling.shape)
    block: Block = tuple(None if is_one(size) else 1 for size in shape)
    steps: list[Moved] = []
    for movement in reversed(site.movements):
        step = movement.forward(block)
        if isinstance(step, Refusal):
            text = "a factor of shape {} does not move below {}: {}"
            details = scaling.shape, movement_name(movement), step.reason
            return Miss(MissCode.AXIS, movement.node, text, *details, progress=2)
        steps.append(step)
        block = step.block
    sizes = shape_of(site.product.x if site.side == "x" else site.product.other)
    whole = [covers(b, size) for b, size in zip(block, sizes, strict=True)]
    # One value for some elements of an axis does not broadcast.
    parts = any(b != 1 and not one for b, one in zip(block, whole, strict=True))
    return tuple(steps) if whole[_summed(site)] and not parts else _refuse_axis(site)
