"""Multiply the result of a product by a constant, instead of a quantized operand."""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.movement.base import Movement
from qfuse.ir.ops.matmul import MATMULS, Matmul, as_matmul
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.patterns.quantized_operand import (
    is_quantized_activation,
    moved_operand,
    reapply_movements,
    scaled_by_constant,
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
    """A product, one operand of which is multiplied or divided by a constant.

    Attributes:
        product: The product.
        side: The argument that is scaled.
        movements: What moves the scaled operand before the product, from the last to the first.
        node: The multiplication or division.
        source: What it multiplies.
        factor: The other operand.
        value: Its value.
    """

    product: Matmul
    side: str
    movements: tuple[Movement, ...]
    node: Node
    source: Node
    factor: Argument
    value: torch.Tensor


class _SinkFactor(Rule[FactorSite], ABC):
    anchors: ClassVar[tuple[OpOverload, ...]] = MATMULS

    def match(self, node: Node) -> FactorSite | Miss:
        """Match a product of two activations that are quantized, one of which is scaled."""
        product = as_matmul(node)
        assert product is not None, "the anchor is a product"
        sides = {"x": product.x, "other": product.other}
        sites = [_site(product, side, operand) for side, operand in sides.items()]
        site = next((found for found in sites if found is not None), None)
        if site is None or not all(map(is_quantized_activation, sides.values())):
            text = "no quantized operand is multiplied by a constant"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        if _is_exact(site) is not (self.exactness is Exactness.EXACT):
            return Miss(MissCode.ARGUMENT, node, "another rule sinks the factor", progress=0)
        return _refuse_factor(site) or site

    def rewrite(self, site: FactorSite, rw: Rewriter) -> None:
        """Multiply the operands as they are, and scale the result."""
        product = site.product
        value = reapply_movements(rw, site.movements, site.source)
        operands = [value, product.other] if site.side == "x" else [product.x, value]
        op, scale = overload_of(product.node), overload_of(site.node)
        assert op is not None, "a product is a call"
        assert scale is not None, "a multiplication is a call"
        made = rw.call(op, *operands)
        rw.replace(product.node, rw.call(scale, made, site.factor))


class SinkFactor(_SinkFactor):
    """``(dequantize(q) * c) @ dequantize(k)`` becomes ``(dequantize(q) @ dequantize(k)) * c``.

    Before::

        q -> dequantize -> mul(c) --.
        k -> dequantize ------------+-> matmul

    After::

        q -> dequantize --.
        k -> dequantize --+-> matmul -> mul(c)

    The product is then fused with both dequantizes, and the factor into its epilogue. The same for
    the right operand, for a quotient, and for a number above views and transposes. ``c`` is a
    number, or a constant with one number per row of the left operand or column of the right one.

    Rounding: the result is rounded before the factor instead of the operand after it.

    Refuses: a factor that varies along the axis that is summed, or that is not finite; float16,
    in which the result may overflow before it is scaled.
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
    """View an operand as a product with a constant below movements."""
    movements, node = moved_operand(operand)
    found = scaled_by_constant(node)
    if found is None:
        return None
    source, factor, value = found
    return FactorSite(product, side, movements, node, source, factor, value)


def _is_exact(site: FactorSite) -> bool:
    if site.value.numel() != 1:
        return False
    number = float(site.value)
    # The mantissa of a power of two.
    return abs(math.frexp(number)[0]) == 0.5 and _LEAST <= abs(number) <= _MOST  # noqa: PLR2004


def _refuse_factor(site: FactorSite) -> Miss | None:
    node, value, source = site.node, site.value, site.source
    shapes = shape_of(site.product.x), shape_of(site.product.other)
    if min(map(len, shapes)) < _MATRIX:
        text = "a product of shapes {} and {} has an operand of one axis"
        return Miss(MissCode.SHAPE, site.product.node, text, *map(tuple, shapes), progress=2)
    if value.dtype is torch.bool or value.is_complex():
        return Miss(MissCode.DTYPE, node, "a constant of {}", value.dtype, progress=2)
    real = dtype_of(node)
    if real not in _WIDE or dtype_of(source) != real:
        text = "it is computed in {}, and its operand is {}"
        return Miss(MissCode.DTYPE, node, text, real, dtype_of(source), progress=2)
    finite = value.isfinite() & ((value != 0) | is_call(node, aten.mul.Tensor))
    if not bool(finite.all()):
        return Miss(MissCode.RANGE, node, "the constant is not finite, or divides by 0", progress=2)
    return _refuse_shape(site)


def _refuse_shape(site: FactorSite) -> Miss | None:
    """Refuse a factor that does not apply to whole rows of the left or columns of the right."""
    node, shape = site.node, tuple(site.value.shape)
    if not same_shape(shape_of(node), shape_of(site.source)):
        text = "it broadcasts its operand of shape {}"
        return Miss(MissCode.SHAPE, node, text, tuple(shape_of(site.source)), progress=2)
    # A tensor of one element with more axes than the result would add axes to that.
    fits = len(shape) <= len(shape_of(site.product.node))
    if site.value.numel() == 1 and fits:
        return None
    summed = -1 if site.side == "x" else -_MATRIX
    along = shape[summed] if len(shape) >= -summed else 1
    text = "a constant of shape {} is not one number per row or column of the result"
    if site.movements:
        text = "a constant of shape {} multiplies the operand before a view: multiply after it"
    if site.movements or along != 1 or not fits:
        return Miss(MissCode.AXIS, node, text, shape, progress=2)
    return None
