"""A matrix product with the factors and corrections after it, matched one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import QuantSpec
from qfuse.normalize.aten.int_matmul.activation import (
    ActivationOperand,
    place,
    refuse_outside,
)
from qfuse.normalize.aten.int_matmul.correction import read_zero
from qfuse.normalize.aten.int_matmul.products import as_int_product
from qfuse.normalize.aten.int_matmul.shift import SHIFTED, shifted
from qfuse.normalize.aten.int_matmul.weight import Weight, read_scale
from qfuse.normalize.aten.qdq.scale_factor import Factor, check_range
from qfuse.normalize.match.broadcast import Broadcast, broadcast_of, is_per_feature
from qfuse.normalize.match.quantized_values import quantized_values
from qfuse.normalize.match.views import ROW_VIEW, with_shape
from qfuse.rewrite.pattern import Path, Step, match
from qfuse.rewrite.pattern.base import is_tensor
from qfuse.rewrite.prelude import Miss, MissCode, Node, arguments, aten

_HALF = torch.float16


def _real(node: Node) -> Node | None:
    # A cast to float8 is not just a rounding: it quantizes, and may overflow.
    source = cast_source(node)
    return source if source is not None and dtype_of(node) in COMPUTE_DTYPES else None


def _long(node: Node) -> Node | None:
    source = cast_source(node)
    widens = source is not None and dtype_of(source) is torch.int32
    return source if widens and dtype_of(node) is torch.int64 else None


_REAL_CAST = Step("cast", _real, (aten._to_copy.default,))
STEPS = (ROW_VIEW, _REAL_CAST, Step("cast to int64", _long, (aten._to_copy.default,)))
"""Ops that may stand between a product, its factors and its corrections."""


@dataclass(frozen=True, slots=True)
class ScaledProduct:
    """``view((x - x_zero) * x_scale @ ((weight - zero) * scale).T + bias)``, as matched so far.

    Attributes:
        base: The product.
        node: The last node that was matched: a factor, a correction, or the product.
        x: The input of the product; ``None`` if it has to be built.
        activation: Its quantized values and parameters; ``None`` if it is a float tensor.
        weight: The weight.
        bias: The bias of the product.
        bias_value: Its value, after it was scaled.
        float_dtype: Dtype of the linear; ``None`` before integers are scaled.
        views: The views of rows between the linear and ``node``, outward.
    """

    base: Node
    node: Node
    x: Node | None
    activation: ActivationOperand | None
    weight: Weight
    bias: Node | None = None
    bias_value: torch.Tensor | None = None
    float_dtype: torch.dtype | None = None
    views: tuple[Node, ...] = ()

    @property
    def takes_row_scale(self) -> bool:
        """Whether the activation is quantized and not scaled yet."""
        x = self.activation
        # A format such as e8m0 has powers of two only, so a float factor does not fit in its scale.
        return x is not None and not x.is_scaled and (x.spec is None or x.spec.is_plain)

    @property
    def takes_correction(self) -> bool:
        """Whether both operands are dequantized, so that a zero point may be corrected."""
        x = self.activation
        if x is None or self.float_dtype is None or self.weight.spec is None:
            return False
        # Until a row scale is added, a linear on bare casts still reads the cast itself.
        return self.x is None if x.spec is None else x.spec.is_plain

    def then(self, path: Path, node: Node) -> ScaledProduct | Miss:
        """Match the factor or the correction ``node`` after the ops ``path``."""
        if is_call(node, aten.mul.Tensor):
            a = arguments(node)
            by = a["other"] if a["self"] is path.top else a["self"]
            return self._scaled(path, node, by)
        if self.float_dtype is None:
            return self._shifted(node)
        if not self.takes_correction:
            return Miss(MissCode.PATTERN, node, "the operands are not dequantized")
        # Until a float dtype is known, a correction is one in integers.
        return self._corrected(path, node)

    def _dtypes(self, path: Path) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the result since the last factor."""
        casts = tuple(dtype_of(n) for n in path.of(_REAL_CAST))
        mine = dtype_of(self.node)
        return (mine, *casts) if mine in COMPUTE_DTYPES and mine is not self.float_dtype else casts

    def _shifted(self, node: Node) -> ScaledProduct | Miss:
        found = match(SHIFTED, node)
        if isinstance(found, Miss):
            return found
        assert self.activation is not None, "it is a product of integers"
        x, zero = shifted(found)
        outside = refuse_outside(node, x, zero)
        moved = replace(self, node=node, activation=replace(self.activation, q=x, zero=zero))
        return outside or moved

    def _scaled(self, path: Path, node: Node, by: Argument) -> ScaledProduct | Miss:
        if isinstance(by, Node) and not is_tensor(by):
            return Miss(MissCode.DTYPE, by, "the factor is not a tensor")
        if self.float_dtype is None:
            return self._integers_scaled(path, node, by)
        if self.float_dtype not in COMPUTE_DTYPES:
            text = "it is a product of {}: cast the operands to a float type, or use torch._int_mm"
            return Miss(MissCode.DTYPE, self.base, text, self.float_dtype)
        scaled = Miss(MissCode.PATTERN, node, "both operands are scaled already")
        on_weight: ScaledProduct | Miss = scaled
        on_x: ScaledProduct | Miss = scaled
        if self.weight.is_open:
            on_weight = self._weight_scaled(path, node, by)
        # The weight comes first: its scale is a constant, so it costs nothing at run time.
        if self.takes_row_scale and isinstance(on_weight, Miss):
            on_x = self._rows_scaled(path, node, by)
        if isinstance(on_weight, ScaledProduct) or not self.takes_row_scale:
            return on_weight
        # A factor that is not one per row belongs to the weight.
        is_for_weight = isinstance(on_x, Miss) and on_x.code is MissCode.AXIS
        return on_weight if is_for_weight and self.weight.is_open else on_x

    def _integers_scaled(self, path: Path, node: Node, by: Argument) -> ScaledProduct | Miss:
        """Assign the first factor after integers to the activation, to the weight, or to both."""
        dtypes = self._dtypes(path) or (dtype_of(node),)
        # Five products of 127 * 127 exceed 65504, the largest float16.
        if _HALF in dtypes:
            text = "the integers pass through float16 before they are scaled, where they overflow"
            return Miss(MissCode.DTYPE, node, text)
        real = torch.float64 if dtypes[0] is torch.float64 else torch.float32
        parts = _split(by, path.top)
        if isinstance(parts, Miss):
            return parts
        for_x, for_weight = parts
        weight = self.weight.dequantized(real)
        if for_weight is not None:
            factor = read_scale(node, for_weight, path.top, real)
            if isinstance(factor, Miss):
                return factor
            scaled = weight.scaled(node, factor, real)
            if isinstance(scaled, Miss):
                return scaled
            weight = scaled
        refusal = _range_refusal(node, for_x, weight, real)
        placed = refusal or self._placed(path, node, for_x)
        return (
            placed if isinstance(placed, Miss) else replace(placed, weight=weight, float_dtype=real)
        )

    def _weight_scaled(self, path: Path, node: Node, by: Argument) -> ScaledProduct | Miss:
        real = self.float_dtype
        assert real is not None, "integers are scaled already"
        # The source overflows to infinity at 65504, before it scales; the fused product would not.
        if _HALF in (*self._dtypes(path), dtype_of(node)) and real is not _HALF:
            return Miss(MissCode.DTYPE, node, "the unscaled result passes through float16")
        compute = torch.float64 if real is torch.float64 else torch.float32
        factor = read_scale(node, by, path.top, compute)
        weight = factor if isinstance(factor, Miss) else self.weight.scaled(node, factor, real)
        if isinstance(weight, Miss):
            return weight
        refusal = weight.range_refusal(node)
        if refusal is not None:
            return refusal
        bias = self.bias_value
        # `(x @ w + b) * s` is `x @ (w * s) + b * s`, and the second product is folded here.
        if self.bias is not None:
            known = constant_value(self.bias) if bias is None else bias
            if known is None:
                text = "the bias is scaled too, and is computed at run time"
                return Miss(MissCode.NOT_CONSTANT, self.bias, text)
            assert isinstance(factor, Factor), "a miss was returned above"
            assert factor.value is not None, "it is a constant"
            bias = (known.to(compute) * factor.value.to(compute).reshape(-1)).to(real)
        views = (*self.views, *path.of(ROW_VIEW))
        return replace(self, node=node, weight=weight, bias_value=bias, views=views)

    def _rows_scaled(self, path: Path, node: Node, by: Argument) -> ScaledProduct | Miss:
        # A bias times a scale per row is a matrix, which a linear cannot add.
        if self.bias is not None:
            return Miss(MissCode.ARGUMENT, self.base, "the linear has a bias, scaled too")
        if _HALF in (self.float_dtype, *self._dtypes(path)):
            return Miss(MissCode.DTYPE, node, "the unscaled result passes through float16")
        if isinstance(by, Node) and not dtype_of(by).is_floating_point:
            return Miss(MissCode.DTYPE, by, "the factor is not a float tensor")
        return self._placed(path, node, by)

    def _placed(self, path: Path, node: Node, scale: Argument) -> ScaledProduct | Miss:
        """Add a scale to the activation, in the shape whose rows it has."""
        x = self.activation
        assert x is not None, "the activation is quantized"
        views = (*self.views, *path.of(ROW_VIEW))
        # Views in front of the activation were chosen for the rows of the zero point.
        if x.before:
            return Miss(MissCode.SHAPE, node, "the rows of its zero point are in another view")
        found = place(x.q, scale, x.zero, path.top, views)
        if isinstance(found, Miss):
            return found
        views = (*found.after, *(() if found.before else views))
        return replace(self, node=node, x=None, activation=found, views=views)

    def _corrected(self, path: Path, node: Node) -> ScaledProduct | Miss:
        x, a = self.activation, arguments(node)
        assert x is not None, "the activation is dequantized"
        # A second correction cannot be expressed as a zero point.
        if x.zero is not None or self.weight.zero is not None:
            return Miss(MissCode.ZERO_POINT, self.base, "there is a zero point already")
        if self.bias is not None:
            return Miss(MissCode.ARGUMENT, self.base, "the linear has a bias")
        if _HALF in self._dtypes(path):
            return Miss(MissCode.DTYPE, node, "the uncorrected result passes through float16")
        zero = read_zero(path.top, a["other"], x, self.weight)
        refusal = zero if isinstance(zero, Miss) else refuse_outside(node, x.q, zero)
        if refusal is not None:
            return refusal
        assert not isinstance(zero, Miss), "a miss was returned above"
        fitted = with_shape(zero, x.grid)
        if fitted is None:
            text = "a zero point of shape {} has other blocks than the scale of shape {}"
            return Miss(MissCode.SHAPE, zero, text, tuple(shape_of(zero)), x.grid)
        views = (*self.views, *path.of(ROW_VIEW))
        return replace(self, node=node, x=None, activation=replace(x, zero=fitted), views=views)


def as_scaled_product(node: Node) -> ScaledProduct | None:
    """View a product of integers, or a linear with a quantized operand."""
    product = as_int_product(node)
    if product is not None:
        weight = Weight(None, product.weight, rows=product.rows)
        return ScaledProduct(
            node, node, None, ActivationOperand(product.x, None, product.zero), weight
        )
    linear = as_linear(node)
    if linear is None:
        return None
    weight = Weight.of(linear.weight)
    x, real = _activation(linear.x, weight), dtype_of(node)
    return ScaledProduct(node, node, linear.x, x, weight, linear.bias, float_dtype=real)


def _activation(x: Node, weight: Weight) -> ActivationOperand | None:
    found = as_dequantize(x)
    if found is not None:
        params = found.params
        return ActivationOperand(found.q, params.scale, params.zero_point, params.spec)
    assert weight.node is not None, "the weight of a linear is a node"
    stored = quantized_values(x)
    if stored is None or stored.views or dtype_of(stored.q) not in BYTES:
        return None
    # A product of integers that is emulated in float.
    if weight.q is None and quantized_values(weight.node) is None:
        return None
    return ActivationOperand(stored.q, None, stored.zero)


def _split(scale: Argument, y: Node) -> tuple[Argument, Node | None] | Miss:
    """Return the activation's and the weight's part of a scale."""
    if not isinstance(scale, Node):
        return scale, None
    if not dtype_of(scale).is_floating_point:
        return Miss(MissCode.DTYPE, scale, "the factor is not a float tensor")
    shape = shape_of(y)
    spread = broadcast_of(shape_of(scale), shape)
    a = arguments(scale) if is_call(scale, aten.mul.Tensor) else {}
    # Both scales may have been multiplied with each other first.
    # A product of a run-time scale per tensor and one per feature has the shape of the latter, and
    # cannot be folded into the weight as a whole.
    if a and (spread is None or (spread is Broadcast.CHANNEL and constant_value(scale) is None)):
        for one, other in ((a["self"], a["other"]), (a["other"], a["self"])):
            if isinstance(other, Node) and is_per_feature(shape_of(other), shape):
                return one, other
    if spread is not None:
        return (None, scale) if spread is Broadcast.CHANNEL else (scale, None)
    text = "a factor of shape {} on a result of shape {} is not a scale of either operand"
    return Miss(MissCode.AXIS, scale, text, tuple(shape_of(scale)), tuple(shape))


def _range_refusal(
    node: Node, for_x: Argument, weight: Weight, float_dtype: torch.dtype
) -> Miss | None:
    """Refuse a known scale with which values overflow: zero times an infinite scale is NaN."""
    # uint8 has the largest magnitude of the 8-bit dtypes, so it stands for all of them; a
    # correction that follows may double it.
    spec = QuantSpec(torch.uint8, 0, 255, (None, None), float_dtype)
    known = constant_value(for_x) if isinstance(for_x, Node) else None
    if isinstance(for_x, (int, float)):
        known = torch.tensor(float(for_x), dtype=torch.float64)
    for_weight = weight.scale.value if isinstance(weight.scale, Factor) else None
    refusals = (
        check_range(node, scale, spec, shifted=True)
        for scale in (known, for_weight)
        if scale is not None
    )
    return next((refusal for refusal in refusals if refusal is not None), None)
