"""Quantized activations that are scaled in several steps, or divided, or cast afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import COMPUTE_DTYPES, widens
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.movement.base import Movement
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.convolution import CONVOLUTIONS
from qfuse.ir.ops.matmul import MATMULS
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import QuantSpec, dtype_name
from qfuse.ir.sizes import Size, same_shape
from qfuse.normalize.aten.operands.dequantize_operand import for_each_zero, told
from qfuse.normalize.aten.operands.factors import (
    ScaledValues,
    TotalScale,
    scaled_values,
    total_scale,
    wide_values,
)
from qfuse.normalize.aten.operands.lift_above_scale import LiftAboveScale
from qfuse.normalize.aten.operands.products import operands_of, replace_operand
from qfuse.normalize.aten.qdq.scale_factor import Factor, exact_zero_factor
from qfuse.normalize.match.broadcast import block_of
from qfuse.normalize.match.quantized_values import spec_of_dequantize
from qfuse.patterns.quantized_operand import (
    is_scaled_activation,
    moved_operand,
    reapply_movements,
)
from qfuse.rewrite.pattern.base import is_tensor
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

_LIFT = LiftAboveScale()


@dataclass(frozen=True, slots=True)
class ScaledOperandSite:
    """A product, and an operand of it that is scaled.

    Attributes:
        product: The product.
        operand: The operand.
        movements: What moves it behind the scales, from the last to the first.
        found: The quantized values and their factors.
        scale: The product of the factors.
        grid: The shape of scale and zero point.
        zero: The zero point.
        spec: How the values are dequantized.
    """

    product: Node
    operand: Node
    movements: tuple[Movement, ...]
    found: ScaledValues
    scale: TotalScale
    grid: tuple[Size, ...]
    zero: Factor | None
    spec: QuantSpec


class DequantizeScaledOperand(Rule[ScaledOperandSite]):
    """``linear(cast(q) / s * t, w)`` becomes ``linear(dequantize(q, t / s), w)``.

    Before::

        q int8 -> cast -> div(s) -> mul(t) -> cast bfloat16 -.
        w -> dequantize -------------------------------------+-> linear

    After::

        t -> div(s) -.
        q -----------+-> qfuse.dequantize to bfloat16 -.
        w -> dequantize -------------------------------+-> linear

    The activation of a linear or convolution with a quantized weight, or an operand of a product of
    two quantized activations. The first scale of a layer's activation may be that of a dequantize.
    Scales are computed in float32, whatever dtype the values have. Applied when all other
    quantization has been found, and for products alone: others compute what is written.

    Rounding: the scales are multiplied first, and a divisor is a factor that is rounded.

    Refuses: a float weight or other operand; scales that are one per element together, or whose
    known product is not positive; a zero point that is not known to be an integer; scaled values
    that are rounded to 16 bits and then multiplied in a wider dtype.
    """

    name = "dequantize-scaled-operand"
    anchors: ClassVar[tuple[OpOverload, ...]] = (*MATMULS, aten.linear.default, *CONVOLUTIONS)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> ScaledOperandSite | Miss:
        """Match a product of quantized operands, one of which is scaled in another way."""
        operands, weight = operands_of(node)
        if weight is not None and as_dequantize(moved_operand(weight)[1]) is None:
            return Miss(MissCode.PATTERN, node, "its weight is not quantized", progress=0)
        found = [_unread(operand, layer=weight is not None) for operand in operands]
        for operand, values in zip(operands, found, strict=True):
            if values is None and weight is None and not is_scaled_activation(operand):
                text = "its operands are not two quantized activations"
                return Miss(MissCode.PATTERN, node, text, progress=0)
        for operand, values in zip(operands, found, strict=True):
            if values is not None:
                site = _site(node, operand, values)
                if isinstance(site, Miss) and values.is_dequantized:
                    # What a dequantize is multiplied with need not be a scale.
                    site.progress = 0
                    return site
                return site if weight is None else told(site)
        near = None if weight is None else _near(operands[0])
        if near is not None:
            return near
        return Miss(MissCode.PATTERN, node, "no operand is scaled in another way", progress=0)

    def rewrite(self, site: ScaledOperandSite, rw: Rewriter) -> None:
        """Multiply the scales, dequantize, and move the result as before."""
        scale = site.scale.build(rw, site.spec.arithmetic.compute)
        if not same_shape(shape_of(scale), site.grid):
            scale = rw.call(aten.expand.default, scale, list(site.grid))
        zero = None if site.zero is None else site.zero.build(rw)
        q = site.found.stored.build(rw)
        value = rw.call(ops.dequantize, q, scale, zero, str(site.spec))
        value = reapply_movements(rw, site.movements, value)
        replace_operand(rw, site.product, site.operand, value)


def _unread(operand: Node, *, layer: bool) -> ScaledValues | None:
    """View an operand that no other rule reads as scaled values.

    Factors above a dequantize scale the result of a product of two activations, but not of a layer.
    """
    if not layer and is_scaled_activation(operand):
        return None
    found = scaled_values(moved_operand(operand)[1])
    return found if found is not None and found.factors and found.path else None


def _site(product: Node, operand: Node, found: ScaledValues) -> ScaledOperandSite | Miss:
    movements, base = moved_operand(operand)
    wrong = _refuse_dtypes(base, found)
    if wrong is not None:
        return wrong
    scale = total_scale(found, torch.float32)
    if isinstance(scale, Miss):
        if scale.code is MissCode.GRANULARITY and is_call(product, *CONVOLUTIONS):
            text = "its scales have one entry per element together, and a convolution reads one"
            return Miss(scale.code, scale.at, text, progress=2)
        return scale
    value, stored = found.value, found.stored
    whole = for_each_zero(scale.factor, stored.zero, shape_of(value))
    zero = exact_zero_factor(value, stored.q, stored.zero, whole)
    if isinstance(zero, Miss):
        return zero
    block = block_of(shape_of(value), whole.shape)
    assert block is not None, "scale and zero point tile the quantized values"
    spec = spec_of_dequantize(stored.q, shape_of(value), whole.shape, dtype_of(base), block)
    return ScaledOperandSite(product, operand, movements, found, scale, whole.shape, zero, spec)


def _refuse_dtypes(base: Node, found: ScaledValues) -> Miss | None:
    """Refuse results in float64, and a rounding before a cast to a wider dtype."""
    last = dtype_of(base)
    if last not in COMPUTE_DTYPES or last is torch.float64:
        text = "the product is computed in {}"
        return Miss(MissCode.DTYPE, base, text, dtype_name(last), progress=2)
    narrow = [dtype for dtype in found.dtypes if not widens(last, dtype)]
    if narrow:
        text = "the scaled values are rounded to {}, and multiplied in {}"
        names = dtype_name(narrow[0]), dtype_name(last)
        return Miss(MissCode.ARITHMETIC, base, text, *names, progress=2)
    return None


def _near(operand: Node) -> Miss | None:
    """Say what keeps an activation from being read, if it seems to be quantized values."""
    base = moved_operand(operand)[1]
    while (source := cast_source(base)) is not None and dtype_of(source).is_floating_point:
        base = source
    lifted = _LIFT.match(base) if is_call(base, *_LIFT.anchors) else None
    if isinstance(lifted, Miss) and lifted.progress > 1:
        return lifted
    if _is_rounded(base):
        text = "the rounded values stay in {}: expected a cast to int8 or uint8 behind a clamp"
        return Miss(MissCode.DTYPE, base, text, dtype_name(dtype_of(base)), progress=2)
    if _is_shifted(base):
        text = "the zero point is subtracted behind the scale, so it is not an integer"
        return Miss(MissCode.ORDER, base, text, progress=2)
    if _is_op_on_scaled(base):
        text = "{} between the scale and the product computes in {}"
        names = op_name(base), dtype_name(dtype_of(base))
        return Miss(MissCode.NOT_QUANTIZED, base, text, *names, progress=2)
    wide = wide_values(base)
    if wide is None:
        return None
    text = "the activation is stored as {}, and not known to fit in 8 bits"
    return Miss(MissCode.RANGE, wide, text, dtype_of(wide), progress=2)


def _is_op_on_scaled(node: Node) -> bool:
    """Whether ``node`` computes on values that are scaled at run time, and on no others."""
    if overload_of(node) is None or is_call(node, aten.mul.Tensor, aten.div.Tensor):
        return False
    inputs = [n for n in node.all_input_nodes if is_tensor(n) and dtype_of(n).is_floating_point]
    found = [scaled_values(n) for n in inputs if constant_value(n) is None]
    return bool(found) and all(
        part is not None and part.factors and not part.is_dequantized for part in found
    )


def _is_rounded(node: Node) -> bool:
    """Whether ``node`` scales values that are rounded, as in ``round(x / s) * s``."""
    a = arguments(node) if is_call(node, aten.mul.Tensor, aten.div.Tensor) else {}
    sides = [a.get("self"), a.get("other") if is_call(node, aten.mul.Tensor) else None]
    return any(isinstance(n, Node) and is_call(n, aten.round.default) for n in sides)


def _is_shifted(node: Node) -> bool:
    """Whether ``node`` shifts scaled values by what may be a zero point times their scale."""
    if not is_call(node, aten.sub.Tensor, aten.add.Tensor):
        return False
    a = arguments(node)
    values, other = a["self"], a["other"]
    if not is_tensor(values) or not is_tensor(other) or constant_value(other) is not None:
        return False
    found = scaled_values(values)
    is_scaled = found is not None and bool(found.factors) and not found.is_dequantized
    return is_scaled and block_of(shape_of(values), shape_of(other)) is not None
