"""Quantized activations that a product reads with a cast alone, without a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.movement.base import Movement
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.convolution import CONVOLUTIONS
from qfuse.ir.ops.matmul import MATMULS
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.normalize.aten.convolution.weight import constant_zero_point
from qfuse.normalize.aten.operands.products import operands_of, replace_operand
from qfuse.normalize.aten.qdq.scale_factor import Factor
from qfuse.normalize.match.constants import unit_scale
from qfuse.normalize.match.quantized_values import (
    QuantizedValues,
    full_range_spec,
    quantized_values,
)
from qfuse.patterns.quantized_operand import (
    is_scaled_activation,
    moved_operand,
    reapply_movements,
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


@dataclass(frozen=True, slots=True)
class CastOperandSite:
    """A product, and an activation of it that is cast.

    Attributes:
        product: The product.
        operand: The activation.
        movements: What moves it behind the cast, from the last to the first.
        base: The cast, or the difference of it and the zero point.
        stored: The quantized values.
        zero: Their zero point.
    """

    product: Node
    operand: Node
    movements: tuple[Movement, ...]
    base: Node
    stored: QuantizedValues
    zero: Factor | None


class DequantizeCastOperand(Rule[CastOperandSite]):
    """``cast(q) @ cast(k).mT`` becomes ``dequantize(q, 1) @ dequantize(k, 1).mT``.

    Before::

        q int8 -> cast ----------------.
        k int8 -> cast -> transpose ---+-> matmul -> mul(scales)

    After::

        q -> qfuse.dequantize(1) ---------------.
        k -> qfuse.dequantize(1) -> transpose --+-> matmul -> mul(scales)

    The scales are applied to the result, or not at all. The same for the activation of a linear or
    convolution with a quantized weight, and with a constant zero point. Applied when all other
    quantization has been found.

    Exact: 8-bit values and their differences are exact in every float dtype.

    Refuses: a product whose other operand is float; a zero point that is not one constant integer.
    """

    name = "dequantize-cast-operand"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.linear.default,
        *CONVOLUTIONS,
        *MATMULS,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> CastOperandSite | Miss:
        """Match a product of quantized operands, one of which is cast."""
        activations, weight = operands_of(node)
        others = [weight] if weight is not None else []
        found = [(operand, _cast_values(operand)) for operand in activations]
        quantized = all(
            stored is not None or is_scaled_activation(operand) for operand, stored in found
        )
        if not quantized or not all(_is_dequantized(other) for other in others):
            text = "its operands are not all quantized"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        for operand, stored in found:
            if stored is None:
                continue
            movements, base = moved_operand(operand)
            zero = constant_zero_point(base, stored.zero, dtype_of(stored.q))
            if isinstance(zero, Miss):
                return zero
            return CastOperandSite(node, operand, movements, base, stored, zero)
        return Miss(MissCode.PATTERN, node, "no activation is cast", progress=0)

    def rewrite(self, site: CastOperandSite, rw: Rewriter) -> None:
        """Dequantize the values with the scale 1 for this product."""
        q = site.stored.build(rw)
        rank = len(shape_of(site.base))
        spec = full_range_spec(site.stored.q, (None,) * rank, dtype_of(site.base))
        zero = None if site.zero is None else site.zero.build(rw)
        scale = unit_scale(rw, site.stored.q, rank)
        value = rw.call(ops.dequantize, q, scale, zero, str(spec))
        value = reapply_movements(rw, site.movements, value)
        replace_operand(rw, site.product, site.operand, value)


def _cast_values(operand: Node) -> QuantizedValues | None:
    """View an activation as 8-bit values that are cast, and perhaps shifted, below movements."""
    base = moved_operand(operand)[1]
    stored = quantized_values(base) if dtype_of(base) in COMPUTE_DTYPES else None
    if stored is None or stored.q is base or dtype_of(stored.q) not in BYTES:
        return None
    return None if is_constant_expression(stored.q) else stored


def _is_dequantized(weight: Node) -> bool:
    return as_dequantize(moved_operand(weight)[1]) is not None
