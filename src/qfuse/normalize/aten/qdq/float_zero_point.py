"""Match a weight whose zero points are fractions, as HQQ stores them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import dtype_of, has_values, shape_of
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, ZeroPointDomain, dtype_range
from qfuse.normalize.aten.qdq.expanded_scale import ExpandedScale, are_whole, read_expanded
from qfuse.normalize.aten.qdq.scale_factor import scale_factor
from qfuse.normalize.match.broadcast import block_of, padded
from qfuse.normalize.match.constants import derived, evaluated
from qfuse.normalize.match.quantized_values import (
    QUANTIZED,
    QuantizedValues,
    moved_constant,
)
from qfuse.rewrite.pattern import Capture, Either, Match, Operand, PatternRule, V, let, op
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten

_NIBBLE = (0, 15)


@dataclass(frozen=True, slots=True)
class FloatZeroPoint:
    """A weight with one scale and one fractional zero point per block.

    Attributes:
        weight: The weight and its parameters.
        stored: How the quantized values are viewed; ``None`` if they are rearranged.
    """

    weight: ExpandedScale
    stored: QuantizedValues | None = None


SCALE = Operand("scale")
FOUND = Capture[FloatZeroPoint]("found")


def _expanded(node: Node) -> FloatZeroPoint | Miss:
    """Read a scale and a zero point that are repeated for every element."""
    found = read_expanded(node)
    if isinstance(found, Miss):
        return found
    if found.zero is None or are_whole(found.zero):
        return Miss(MissCode.PATTERN, node, "its zero points are integers", progress=0)
    return FloatZeroPoint(found)


def _tiled(match: Match, node: Node) -> FloatZeroPoint | Miss:
    """Read a scale and a zero point that broadcast over the blocks."""
    stored, scale = QuantizedValues.of(match), match[SCALE]
    value = _fractions(node, stored.zero)
    if isinstance(value, Miss):
        repeated = read_expanded(node)
        # Why parameters that are repeated per element are not read says more.
        return repeated if isinstance(repeated, Miss) and repeated.progress else value
    known = moved_constant(stored.q)
    if known is None:
        unpacked = evaluated(stored.q)
        known = None if unpacked is None else (stored.q, unpacked)
    if known is None or not has_values(known[1]) or dtype_of(stored.q) not in BYTES:
        return Miss(MissCode.NOT_CONSTANT, stored.q, "it is no 8-bit weight", progress=0)
    shape = shape_of(node)
    factor = scale_factor(node, scale, shape, torch.float32)
    if isinstance(factor, Miss):
        return factor
    grid: tuple[int, ...] = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        tuple(int(size) for size in factor.shape), padded(tuple(value.shape), len(shape))
    )
    block = block_of(shape, grid)
    if factor.value is None or block is None:
        text = "a zero point of shape {} does not tile values of shape {}"
        return Miss(MissCode.SHAPE, node, text, tuple(value.shape), tuple(shape))
    scales, zeros = (part.expand(grid).contiguous() for part in (factor.value, value))
    weight = ExpandedScale(node, *known, scales, zeros, block)
    return FloatZeroPoint(weight, stored)


def _fractions(node: Node, zero: object) -> torch.Tensor | Miss:
    """Return the value of a zero point that is not an integer."""
    value = constant_value(zero)
    if value is None or not has_values(value) or not value.is_floating_point():
        return Miss(MissCode.PATTERN, node, "no float zero point is subtracted", progress=0)
    if not bool(value.isfinite().all()):
        return Miss(MissCode.ZERO_POINT, node, "a zero point is infinite or NaN")
    if are_whole(value):
        return Miss(MissCode.PATTERN, node, "its zero points are integers", progress=0)
    return value


class FloatZero(PatternRule):
    """``(q - z) * s`` with fractions ``z`` becomes ``dequantize`` with an offset.

    Before::

        const q uint8 -> cast -> sub(const z float) -> mul(const s)

    After::

        const q uint8, s, (middle - z) * s -> qfuse.dequantize, domain float_offset

    As HQQ writes it, with one scale and zero point per group that broadcast, or are repeated per
    element. ``middle`` is the middle of the range of the values.

    Rounding: ``q * s - z * s`` instead of ``(q - z) * s``.

    Refuses: parameters that are computed at run time, infinite or NaN; scales that are negative;
    zero points that do not tile the values.
    """

    name = "float-zero-point"
    exactness = Exactness.ROUNDING
    pattern = Either(
        op(aten.mul.Tensor, V("one"), V("other")).given(let(FOUND, _expanded)).core(),
        (QUANTIZED.named("value") * SCALE).giving(*COMPUTE_DTYPES).given(let(FOUND, _tiled)).core(),
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Add the constants, the dequantize, and the order."""
        found, real = site[FOUND], dtype_of(site.node)
        weight, zero = found.weight, found.weight.zero
        assert zero is not None, "the match has read the zero points"
        compute = torch.float64 if real is torch.float64 else torch.float32
        spec = offset_spec(weight.values, weight.block, real, compute)
        offset = offset_of(spec, weight.scale, zero)
        if found.stored is None:
            q = derived(rw, weight.home, weight.values, "stored")
        else:
            q = found.stored.build(rw)
        scale = derived(rw, weight.home, weight.scale, "scale")
        y = rw.call(ops.dequantize, q, scale, derived(rw, weight.home, offset, "offset"), str(spec))
        rw.replace(site.node, weight.in_order(y, rw))


def offset_spec(
    values: torch.Tensor, block: Block, real: torch.dtype, compute: torch.dtype
) -> QuantSpec:
    """Return the spec of a weight with an offset per block: ``(q - middle) * scale + offset``."""
    domain = ZeroPointDomain.FLOAT_OFFSET
    bounds = _range_of_values(values)
    return QuantSpec(values.dtype, *bounds, block, real, Arithmetic(compute), domain)


def offset_of(
    spec: QuantSpec, scale: torch.Tensor, zero: torch.Tensor, added: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Return the offset with which a weight is ``(q - zero) * scale + added``.

    Args:
        spec: What :func:`offset_spec` returned.
        scale: One number per block, as is ``zero``.
        zero: The zero point, which may be fractional.
        added: What broadcasts with both.
    """
    middle = (spec.quant_min + spec.quant_max + 1) / 2
    moved = (middle - zero.double()) * scale.double() + added
    return moved.to(spec.arithmetic.compute)


def _range_of_values(values: torch.Tensor) -> tuple[int, int]:
    """Return the range of 4-bit values, or that of the dtype."""
    least, most = _NIBBLE
    fits = values.numel() and least <= int(values.min()) and int(values.max()) <= most
    return _NIBBLE if fits else dtype_range(values.dtype)
