"""Multiply the result of a product by a constant, instead of a quantized operand."""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.movement.base import Movement
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.matmul import MATMULS, Matmul, as_matmul
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.optimize.match.move_qparams import GraphMover
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

_FACTORS = (aten.mul.Tensor, aten.div.Tensor)
_MATRIX = 2
# Bounds the search above an operand.
_STEPS = 16
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
        if site is None or not all(map(_is_quantized, sides.values())):
            text = "no quantized operand is multiplied by a constant"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        if _is_exact(site) is not (self.exactness is Exactness.EXACT):
            return Miss(MissCode.ARGUMENT, node, "another rule sinks the factor", progress=0)
        return _refuse_factor(site) or site

    def rewrite(self, site: FactorSite, rw: Rewriter) -> None:
        """Multiply the operands as they are, and scale the result."""
        product = site.product
        value, mover = site.source, GraphMover(rw)
        for movement in reversed(site.movements):
            value = movement.apply(mover, value)
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
    movements: list[Movement] = []
    node = operand
    while len(movements) < _STEPS and (movement := movement_of(node)) is not None:
        movements.append(movement)
        node = movement.source
    found = _scaled(node)
    if found is None:
        return None
    source, factor, value = found
    return FactorSite(product, side, tuple(movements), node, source, factor, value)


def _scaled(node: Node) -> tuple[Node, Argument, torch.Tensor] | None:
    """Return the value that ``node`` multiplies or divides by a constant, and the constant."""
    if not is_call(node, *_FACTORS):
        return None
    a = arguments(node)
    sides = [(a["self"], a["other"])]
    # `c / x` is not linear in x.
    if not is_call(node, aten.div.Tensor):
        sides.append((a["other"], a["self"]))
    for source, factor in sides:
        value = _value(factor)
        if isinstance(source, Node) and value is not None and constant_value(source) is None:
            return source, factor, value
    return None


def _value(factor: object) -> torch.Tensor | None:
    if isinstance(factor, bool):
        return None
    if isinstance(factor, (int, float)):
        return torch.tensor(float(factor), dtype=torch.float64)
    return constant_value(factor)


def _is_quantized(operand: Node) -> bool:
    """Whether an operand is a dequantize of an activation, below movements and factors."""
    for _ in range(_STEPS):
        movement, scaled = movement_of(operand), _scaled(operand)
        if movement is not None:
            operand = movement.source
        elif scaled is not None:
            operand = scaled[0]
        else:
            break
    found = as_dequantize(operand)
    return found is not None and constant_of(found.q) is None


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
