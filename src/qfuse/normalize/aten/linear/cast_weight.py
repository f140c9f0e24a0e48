"""Weights of linears that are quantized values cast to float, without a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.views import dtype_of
from qfuse.normalize.aten.convolution.weight import constant_zero_point, refuse_cast_weight
from qfuse.normalize.aten.qdq.scale_factor import Factor
from qfuse.normalize.match.constants import unit_scale
from qfuse.normalize.match.quantized_values import STORED, full_range_spec, quantized_values
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule, aten


@dataclass(frozen=True, slots=True)
class CastWeight:
    """The weight of a linear, its quantized values, and their zero point."""

    weight: Node
    q: Node
    zero_point: Factor | None


class DequantizeCast(Rule[CastWeight]):
    """``linear(x, cast(w) - z)`` becomes ``linear(x, dequantize(w, 1, z))``.

    Before::

        const w int8 -> cast -> sub(z) -> linear

    After::

        const w int8 -> qfuse.dequantize(1, z) -> linear

    Applied when every scale behind the product has been found.

    Exact: 8-bit values and the differences of integers are exact in every float dtype.

    Refuses: a weight that is not constant 8-bit values; a zero point that is not one constant
    integer; views between the cast and the linear.
    """

    name = "dequantize-cast"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.linear.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> CastWeight | Miss:
        """Match a linear whose weight is cast."""
        linear = as_linear(node)
        stored = None if linear is None else quantized_values(linear.weight)
        if linear is None or stored is None or stored.q is linear.weight:
            text = "the weight is not a cast of quantized values"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        refusal = refuse_cast_weight(linear.weight, stored, STORED)
        if refusal is not None:
            return refusal
        zero = constant_zero_point(linear.weight, stored.zero, dtype_of(stored.q))
        return zero if isinstance(zero, Miss) else CastWeight(linear.weight, stored.q, zero)

    def rewrite(self, site: CastWeight, rw: Rewriter) -> None:
        """Replace the weight by a dequantize with the scale 1."""
        spec = full_range_spec(site.q, (None, None), dtype_of(site.weight))
        scale = unit_scale(rw, site.q, 2)
        zero = None if site.zero_point is None else site.zero_point.build(rw)
        rw.replace(site.weight, rw.call(ops.dequantize, site.q, scale, zero, str(spec)))
