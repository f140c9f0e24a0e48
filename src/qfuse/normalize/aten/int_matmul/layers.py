"""Turn linears and convolutions of integers into those of floats, whose results are exact."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.convolution import CONVOLUTIONS, Convolution, as_convolution
from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of, tensor_of
from qfuse.ir.quant.spec import dtype_range
from qfuse.normalize.aten.convolution.weight import constant_zero_point
from qfuse.normalize.aten.qdq.scale_factor import Factor
from qfuse.normalize.match.constants import is_unit, unit_scale
from qfuse.normalize.match.quantized_values import (
    QuantizedValues,
    full_range_spec,
    quantized_values,
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

_SUMS = (torch.int32, torch.int64)
# Every integer up to here is a float32.
_EXACT = 1 << 24


@dataclass(frozen=True, slots=True)
class IntegerOperand:
    """8-bit values that are cast to integers, and perhaps shifted.

    Attributes:
        value: The cast or difference.
        q: The 8-bit values.
        zero: What is subtracted from them.
        stored: The 8-bit values with views between them and the cast; ``None`` without any.
    """

    value: Node
    q: Node
    zero: Factor | None
    stored: QuantizedValues | None = None

    @property
    def largest(self) -> int:
        """A bound of the absolute values."""
        low, high = dtype_range(dtype_of(self.q))
        shift = 0
        if self.zero is not None and self.zero.value is not None:
            shift = int(self.zero.value.item())
        return max(shift - low, high - shift)

    def build(self, rw: Rewriter) -> Node:
        """Dequantize the values with the scale 1 to float32."""
        rank = len(shape_of(self.value))
        spec = full_range_spec(self.q, (None,) * rank, torch.float32)
        zero = None if self.zero is None else self.zero.build(rw)
        q = self.q if self.stored is None else self.stored.build(rw)
        return rw.call(ops.dequantize, q, unit_scale(rw, self.q, rank), zero, str(spec))


@dataclass(frozen=True, slots=True)
class IntegerLayerSite:
    """A linear or convolution of integers."""

    node: Node
    x: IntegerOperand
    weight: IntegerOperand


class FuseIntLayer(Rule[IntegerLayerSite]):
    """``conv(int32(x), int32(w))`` becomes ``int32(conv(dequantize(x), dequantize(w)))``.

    Before::

        x int8, w int8 -> cast int32 -> conv2d

    After::

        x -> qfuse.dequantize(1) --+
        w -> qfuse.dequantize(1) --+-> conv2d -> cast int32

    The same for linears, and with constant zero points that are subtracted in integers. Products in
    other spellings have a rule of their own.

    Exact: all partial sums are integers that float32 holds.

    Refuses: sums that float32 rounds; a bias; weights that are computed at run time; values of more
    than 8 bits; other devices.
    """

    name = "fuse-int-layer"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.linear.default, *CONVOLUTIONS)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> IntegerLayerSite | Miss:
        """Match a layer that computes in integers."""
        layer = as_linear(node) or as_convolution(node)
        assert layer is not None, "the anchor is a layer"
        if dtype_of(node) not in _SUMS or tensor_of(node).device.type != "cpu":
            return Miss(MissCode.PATTERN, node, "it does not sum integers", progress=0)
        x, weight = _operand(layer.x), _operand(layer.weight)
        if isinstance(x, Miss):
            return x
        if isinstance(weight, Miss):
            return weight
        return _refuse(layer, x, weight) or IntegerLayerSite(node, x, weight)

    def rewrite(self, site: IntegerLayerSite, rw: Rewriter) -> None:
        """Dequantize both operands with the scale 1, and cast the sums."""
        x, weight = site.x.build(rw), site.weight.build(rw)
        new = {site.x.value: x, site.weight.value: weight}
        node, op = site.node, overload_of(site.node)
        assert op is not None, "a layer is a call"
        args = [new.get(arg, arg) if isinstance(arg, Node) else arg for arg in node.args]
        kwargs = {k: new.get(v, v) if isinstance(v, Node) else v for k, v in node.kwargs.items()}
        y = rw.call(op, *args, **kwargs)
        rw.replace(node, rw.call(aten._to_copy.default, y, dtype=dtype_of(node)))


def _refuse(layer: Linear | Convolution, x: IntegerOperand, weight: IntegerOperand) -> Miss | None:
    node = layer.node
    if layer.bias is not None or (isinstance(layer, Convolution) and layer.transposed):
        text = "it has a bias in integers, or is transposed"
        return Miss(MissCode.ARGUMENT, node, text, progress=1)
    if is_constant_expression(x.q) or not is_constant_expression(weight.q):
        text = "its weight is computed at run time"
        return Miss(MissCode.NOT_CONSTANT, weight.q, text, progress=2)
    # One term per value of the weight of an output.
    terms = prod(int(size) for size in shape_of(layer.weight)[1:])
    if terms * x.largest * weight.largest <= _EXACT:
        return None
    text = "its sums may exceed 2^24, and float32 has not all integers beyond"
    return Miss(MissCode.RANGE, node, text, progress=2)


def _operand(value: Node) -> IntegerOperand | Miss:
    """View an operand as 8-bit values that are cast to integers."""
    made = as_dequantize(value)
    # Another rule dequantizes the weights of convolutions with the scale 1, in any dtype.
    if made is not None and is_unit(made.params.scale) and made.params.zero_point is None:
        return IntegerOperand(value, made.q, None)
    stored = quantized_values(value)
    if stored is None or dtype_of(stored.q) not in BYTES:
        text = "{} is not a cast of 8-bit values"
        return Miss(MissCode.DTYPE, value, text, value.name, progress=1)
    zero = constant_zero_point(value, stored.zero, dtype_of(stored.q))
    return zero if isinstance(zero, Miss) else IntegerOperand(value, stored.q, zero, stored)
