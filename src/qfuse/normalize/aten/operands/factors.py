"""Factors and divisors of quantized values, one after another, as one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import ZeroPointDomain, dtype_name
from qfuse.ir.sizes import Size, is_one
from qfuse.normalize.aten.qdq.scale_factor import Factor, is_per_element, scale_factor
from qfuse.normalize.match.broadcast import block_of, padded
from qfuse.normalize.match.quantized_values import QuantizedValues, quantized_values
from qfuse.normalize.match.quotients import least_of
from qfuse.normalize.match.signs import is_not_negative
from qfuse.rewrite.pattern.base import is_tensor
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter, arguments, aten

WIDE_INTEGERS = (torch.int16, torch.int32, torch.int64)
"""The dtypes in which 8-bit values are held for arithmetic."""

_PRODUCTS = (aten.mul.Tensor, aten.div.Tensor)
# Bounds the walk; each product may have two sides.
_STEPS = 6
_INVERSE = "one_over"


@dataclass(frozen=True, slots=True)
class ScaledValues:
    """Quantized values with what is multiplied to them.

    Attributes:
        value: The values, cast and perhaps shifted.
        stored: The quantized values.
        factors: The product, its factor, and whether it divides; the one next to the values first.
        dtypes: The dtypes of the products and casts above the values.
        path: The products and casts above the values; those that end with a dequantize start there.
    """

    value: Node
    stored: QuantizedValues
    factors: tuple[tuple[Node, Argument, bool], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    path: tuple[Node, ...] = ()

    @property
    def is_dequantized(self) -> bool:
        """Whether the values are a dequantize, whose scale is the first factor."""
        return as_dequantize(self.value) is not None


def scaled_values(node: Node, steps: int = _STEPS) -> ScaledValues | None:
    """View a float as 8-bit values, computed at run time, that are multiplied, divided and cast."""
    stored = quantized_values(node)
    if stored is not None and dtype_of(stored.q) in BYTES:
        return None if is_constant_expression(stored.q) else ScaledValues(node, stored)
    if as_dequantize(node) is not None:
        return _dequantized(node)
    if steps == 0 or dtype_of(node) not in COMPUTE_DTYPES:
        return None
    for source, factor, divides in _sources(node):
        found = scaled_values(source, steps - 1)
        if found is None:
            continue
        known = (*found.factors, (node, factor, divides)) if factor is not None else found.factors
        dtypes, path = (*found.dtypes, dtype_of(node)), (*found.path, node)
        return ScaledValues(found.value, found.stored, known, dtypes, path)
    return None


def _dequantized(node: Node) -> ScaledValues | None:
    """View a dequantize of 8-bit values, computed at run time, with one scale per index at most."""
    made = as_dequantize(node)
    assert made is not None, "the caller looked"
    spec, params = made.params.spec, made.params
    whole = all(b == 1 or covers(b, n) for b, n in zip(spec.block, shape_of(node), strict=True))
    integers = spec.domain in {ZeroPointDomain.NONE, ZeroPointDomain.INT}
    if not (spec.is_plain and whole and integers) or dtype_of(made.q) not in BYTES:
        return None
    if is_constant_expression(made.q):
        return None
    stored = QuantizedValues(made.q, zero=params.zero_point)
    return ScaledValues(node, stored, ((node, params.scale, False),), (dtype_of(node),))


def wide_values(node: Node, steps: int = _STEPS) -> Node | None:
    """Return the integers of more than 8 bits, computed at run time, that ``node`` scales."""
    for source, _, _ in _sources(node):
        if dtype_of(source) in WIDE_INTEGERS:
            return None if is_constant_expression(source) else source
        if steps and dtype_of(source).is_floating_point:
            found = wide_values(source, steps - 1)
            if found is not None:
                return found
    return None


def _sources(node: Node) -> Iterator[tuple[Node, Argument, bool]]:
    """Yield what ``node`` may scale, the factor, and whether it divides; no factor for a cast."""
    source = cast_source(node)
    if source is not None:
        yield source, None, False
    if not is_call(node, *_PRODUCTS):
        return
    a, divides = arguments(node), is_call(node, aten.div.Tensor)
    sides = [(a["self"], a["other"])]
    if not divides:
        sides.append((a["other"], a["self"]))
    for one, other in sides:
        if is_tensor(one) and other is not one:
            yield one, other, divides


@dataclass(frozen=True, slots=True)
class TotalScale:
    """The product of factors.

    Attributes:
        parts: The factors, and whether each divides.
        factor: The product: its shape, and its value if it is known.
    """

    parts: tuple[tuple[Factor, bool], ...]
    factor: Factor

    def build(self, rw: Rewriter, compute: torch.dtype) -> Node:
        """Return the product, in the dtype ``compute``."""
        if self.factor.value is not None:
            return self.factor.build(rw)
        total: Node | None = None
        # The first part is a factor if there is one: a divisor alone takes a reciprocal.
        for part, divides in sorted(self.parts, key=lambda each: each[1]):
            node = _cast(rw, part.build(rw), compute)
            if divides:
                total = _quotient(rw, total, node, _least(part))
            else:
                total = node if total is None else rw.call(aten.mul.Tensor, total, node)
        assert total is not None, "there is a factor"
        return total


def _least(divisor: Factor) -> float:
    """Return a positive lower bound of a divisor; 0 if none is known."""
    if divisor.value is not None:
        return float(divisor.value.min()) if divisor.value.numel() else 0.0
    return least_of(divisor.home) if is_not_negative(divisor.home) else 0.0


def _quotient(rw: Rewriter, total: Node | None, divisor: Node, least: float) -> Node:
    """Divide a scale; one that would overflow is the largest number, so that zeros stay zeros.

    ``0 / 1e-40`` is 0, and ``0 * (1 / 1e-40)`` would be NaN. A divisor of zero and an infinite
    scale give NaN in both.
    """
    info = torch.finfo(dtype_of(divisor))
    if total is None:
        made = rw.call(aten.reciprocal.default, divisor)
    else:
        made = rw.call(aten.div.Tensor, total, divisor)
    if least >= (info.tiny if total is None else 1):
        return made
    keeps = rw.call(aten.eq.Scalar, divisor, 0)
    if total is not None:
        keeps = rw.call(aten.logical_or.default, keeps, rw.call(aten.isinf.default, total))
    bounded = rw.call(aten.clamp.default, made, info.min, info.max)
    return rw.call(aten.where.self, keeps, made, bounded)


def total_scale(found: ScaledValues, compute: torch.dtype) -> TotalScale | Miss:
    """Multiply all factors; refuse what is not one number per block."""
    shape, parts = shape_of(found.value), []
    for node, by, divides in found.factors:
        part = scale_factor(node, by, shape, compute)
        if isinstance(part, Miss):
            return part
        parts.append((part, divides))
    grid = _joint([part.shape for part, _ in parts], len(shape))
    last = found.factors[-1][0]
    if block_of(shape, grid) is None or is_per_element(shape, grid):
        text = "its scales have one entry per element together"
        return Miss(MissCode.GRANULARITY, last, text, progress=2)
    known = _known(parts, compute)
    if known is not None and not bool((known.isfinite() & (known > 0)).all()):
        text = "the product of its scales is not a positive number of {}"
        return Miss(MissCode.RANGE, last, text, dtype_name(compute), progress=2)
    value = None if known is None else known.reshape([int(size) for size in grid])
    home = parts[0][0].home
    what = _INVERSE if len(parts) == 1 and parts[0][1] else "scale"
    return TotalScale(tuple(parts), Factor(home, grid, value, what))


def _known(parts: Sequence[tuple[Factor, bool]], compute: torch.dtype) -> torch.Tensor | None:
    """Return the product of constant factors, rounded once; ``None`` if one has no value."""
    total = torch.ones((), dtype=torch.float64)
    for part, divides in parts:
        if part.value is None:
            return None
        value = part.value.double()
        total = total / value if divides else total * value
    return total.to(compute)


def _joint(shapes: Sequence[Sequence[Size]], rank: int) -> tuple[Size, ...]:
    """Return the shape to which factors broadcast, each of which tiles the same tensor."""
    joint: list[Size] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(padded(shape, rank)):
            if not is_one(size):
                joint[axis] = size
    return tuple(joint)


def _cast(rw: Rewriter, node: Node, dtype: torch.dtype) -> Node:
    return node if dtype_of(node) == dtype else rw.call(aten._to_copy.default, node, dtype=dtype)
