"""Quantized values that are scaled at run time, as operands of products of two activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.movement.base import Movement
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.matmul import MATMULS, Matmul, as_matmul
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.normalize.aten.qdq.scale_factor import Factor, scale_factor
from qfuse.normalize.match.broadcast import block_of
from qfuse.normalize.match.quantized_values import spec_of_dequantize
from qfuse.patterns.quantized_operand import (
    is_scaled_activation,
    moved_operand,
    reapply_movements,
    scaled_at_run_time,
)
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
)


@dataclass(frozen=True, slots=True)
class ScaledOperand:
    """A product, one operand of which is scaled at run time.

    Attributes:
        product: The product.
        side: The operand: ``x`` or ``other``.
        movements: What moves the scaled values, from the last one to the first.
        node: The multiplication.
        q: The quantized values.
        scale: Their scale.
    """

    product: Matmul
    side: str
    movements: tuple[Movement, ...]
    node: Node
    q: Node
    scale: Factor


class DequantizeOperand(Rule[ScaledOperand]):
    """``x @ (cast(k) * s)`` becomes ``x @ dequantize(k, s)`` if ``x`` is quantized too.

    Before::

        k int8 -> cast -> mul(s) -> transpose --.
        q -> dequantize ------------------------+-> matmul

    After::

        k, s -> qfuse.dequantize -> transpose --.
        q -> dequantize ------------------------+-> matmul

    This is a KV cache of 8-bit values whose scales are another cache, or are passed in. As nothing
    is known about the sign of these scales, the dequantize is for this product alone.

    Applied when all other quantization has been found.

    Exact: 8-bit values are exact in every float dtype, and a 16-bit dtype rounds the product once,
    as ``qfuse.dequantize`` does.

    Refuses: a scale per element, or one that broadcasts the quantized values to a larger shape;
    another dtype of the scale; a left and right operand of which one is float.
    """

    name = "dequantize-operand"
    anchors: ClassVar[tuple[OpOverload, ...]] = MATMULS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ScaledOperand | Miss:
        """Match a product of quantized values, of which one are scaled at run time."""
        product = as_matmul(node)
        assert product is not None, "the anchor is a product"
        sides = {"x": product.x, "other": product.other}
        if not all(map(is_scaled_activation, sides.values())):
            text = "its operands are not two quantized activations"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        for side, operand in sides.items():
            movements, base = moved_operand(operand)
            found = scaled_at_run_time(base)
            if found is None:
                continue
            q, by = found
            if dtype_of(base) not in FLOATS or dtype_of(by) != dtype_of(base):
                text = "the product of quantized values and their scale {} is {}"
                details = dtype_of(by), dtype_of(base)
                return Miss(MissCode.DTYPE, base, text, *details, progress=2)
            scale = scale_factor(base, by, shape_of(q), dtype_of(base))
            if isinstance(scale, Miss):
                return scale
            return ScaledOperand(product, side, movements, base, q, scale)
        return Miss(MissCode.PATTERN, node, "no operand is scaled at run time", progress=0)

    def rewrite(self, site: ScaledOperand, rw: Rewriter) -> None:
        """Dequantize the values for this product, and move them as before."""
        q, scale, product = site.q, site.scale, site.product
        block = block_of(shape_of(q), scale.shape)
        assert block is not None, "the scale tiles the quantized values"
        spec = spec_of_dequantize(q, shape_of(q), scale.shape, dtype_of(site.node), block)
        value = rw.call(ops.dequantize, q, scale.build(rw), None, str(spec))
        value = reapply_movements(rw, site.movements, value)
        operands = [value, product.other] if site.side == "x" else [product.x, value]
        op = overload_of(product.node)
        assert op is not None, "a product is a call"
        rw.replace(product.node, rw.call(op, *operands))
