"""Quantized values that are scaled at run time, as activations of products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from torch.fx.node import Argument

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.convolution import CONVOLUTIONS, as_convolution
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.matmul import MATMULS, as_matmul
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import Size, is_one
from qfuse.normalize.aten.operands.products import replace_operand
from qfuse.normalize.aten.qdq.scale_factor import Factor, exact_zero_factor, scale_factor
from qfuse.normalize.match.broadcast import block_of, padded
from qfuse.normalize.match.quantized_values import (
    QuantizedValues,
    quantized_values,
    spec_of_dequantize,
)
from qfuse.patterns.quantized_operand import (
    QuantizedOperand,
    is_scaled_activation,
    moved_operand,
    quantized_operand,
    refuse_float_operand,
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
    aten,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScaledOperand:
    """A product, one operand of which is scaled at run time.

    Attributes:
        product: The product.
        value: The operand.
        operand: What is applied to the scaled values.
        stored: The quantized values.
        scale: Their scale.
        zero: Their zero point.
    """

    product: Node
    value: Node
    operand: QuantizedOperand
    stored: QuantizedValues
    scale: Factor
    zero: Factor | None


class DequantizeOperand(Rule[ScaledOperand]):
    """``x @ (cast(k) * s)`` becomes ``x @ dequantize(k, s)`` if ``x`` is quantized too.

    Before::

        k int8 -> cast -> mul(s) -> transpose --.
        q -> dequantize ------------------------+-> matmul

    After::

        k, s -> qfuse.dequantize -> transpose --.
        q -> dequantize ------------------------+-> matmul

    This is a KV cache of 8-bit values whose scales are another cache, or are passed in. As nothing
    is known about the sign of these scales, the dequantize is for this product alone. A zero point
    is alike: ``(cast(k) - z) * s``. Movements and other factors may follow.

    The same for the activation of a linear or convolution whose weight is dequantized, without
    other factors: an activation that another model quantized is passed in with its scale.

    Applied when all other quantization has been found.

    Exact: 8-bit values are exact in every float dtype, and a 16-bit dtype rounds the product once,
    as ``qfuse.dequantize`` does.

    Refuses: a float weight; a scale per element, or one that broadcasts the quantized values to a
    larger shape; another dtype of the scale; a left and right operand of which one is float; a zero
    point that is not known to be an integer, or has other blocks than the scale.
    """

    name = "dequantize-operand"
    anchors: ClassVar[tuple[OpOverload, ...]] = (*MATMULS, aten.linear.default, *CONVOLUTIONS)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ScaledOperand | Miss:
        """Match a product of quantized values, of which one are scaled at run time."""
        product = as_matmul(node)
        if product is None:
            return _activation(node)
        sides = {"x": product.x, "other": product.other}
        if not all(map(is_scaled_activation, sides.values())):
            return _refuse_float(node, sides)
        for value in sides.values():
            operand = quantized_operand(value)
            found = None if operand is None else scaled_at_run_time(operand.base)
            if operand is not None and found is not None:
                return _scaled(node, value, operand, *found)
        return Miss(MissCode.PATTERN, node, "no operand is scaled at run time", progress=0)

    def rewrite(self, site: ScaledOperand, rw: Rewriter) -> None:
        """Dequantize the values for this product, and do with them what was done before."""
        scale, zero, product, base = site.scale, site.zero, site.product, site.operand.base
        shape = shape_of(base)
        block = block_of(shape, scale.shape)
        assert block is not None, "the scale tiles the quantized values"
        spec = spec_of_dequantize(site.stored.q, shape, scale.shape, dtype_of(base), block)
        q, made = site.stored.build(rw), None if zero is None else zero.build(rw)
        value = rw.call(ops.dequantize, q, scale.build(rw), made, str(spec))
        value = site.operand.reapply(rw, value)
        replace_operand(rw, product, site.value, value)


def _activation(node: Node) -> ScaledOperand | Miss:
    """View the activation of a layer as values that are scaled at run time, below movements."""
    layer = as_linear(node) or as_convolution(node)
    assert layer is not None, "the anchor is a product"
    movements, base = moved_operand(layer.x)
    found = scaled_at_run_time(base)
    if found is None or as_dequantize(moved_operand(layer.weight)[1]) is None:
        text = "it is not a product of an activation scaled at run time and a quantized weight"
        return Miss(MissCode.PATTERN, node, text, progress=0)
    return told(_scaled(node, layer.x, QuantizedOperand(movements, base), *found))


def told(found: T | Miss) -> T | Miss:
    """Return what was found; a miss at a layer says why its kernel reads floats."""
    if isinstance(found, Miss):
        found.progress = max(found.progress, 2)
    return found


def _refuse_float(node: Node, sides: Mapping[str, Node]) -> Miss:
    """Refuse a product with a float operand; one that is scaled beside it is worth a word."""
    for side, value in sides.items():
        operand = quantized_operand(value)
        if operand is not None and scaled_at_run_time(operand.base) is not None:
            rest = sides["x" if side == "other" else "other"]
            return refuse_float_operand("left" if side == "other" else "right", rest)
    text = "its operands are not two quantized activations"
    return Miss(MissCode.PATTERN, node, text, progress=0)


def _scaled(
    product: Node, given: Node, operand: QuantizedOperand, value: Node, by: Argument
) -> ScaledOperand | Miss:
    base, stored = operand.base, quantized_values(value)
    if stored is None:
        text = "{} does not subtract a zero point from quantized values"
        return Miss(MissCode.PATTERN, value, text, value.name, progress=1)
    kind = dtype_of(by) if isinstance(by, Node) else dtype_of(base)
    if dtype_of(base) not in FLOATS or kind != dtype_of(base):
        text = "the product of quantized values and their scale {} is {}"
        return Miss(MissCode.DTYPE, base, text, kind, dtype_of(base), progress=2)
    scale = scale_factor(base, by, shape_of(value), dtype_of(base))
    if isinstance(scale, Miss):
        return scale
    scale = for_each_zero(scale, stored.zero, shape_of(value))
    zero = exact_zero_factor(base, stored.q, stored.zero, scale)
    if isinstance(zero, Miss):
        return zero
    return ScaledOperand(product, given, operand, stored, scale, zero)


def for_each_zero(scale: Factor, zero: Argument, shape: Sequence[Size]) -> Factor:
    """Repeat one scale for every zero point."""
    if not isinstance(zero, Node) or not all(map(is_one, scale.shape)):
        return scale
    grid = padded(shape_of(zero), len(shape))
    if block_of(shape, grid) is None or not all(isinstance(size, int) for size in grid):
        return scale
    value = None if scale.value is None else scale.value.expand([int(size) for size in grid])
    return replace(scale, shape=grid, value=None if value is None else value.contiguous())
