"""Activations of linears and convolutions that come with their scale."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.normalize.aten.operands.test_dequantize_operand import refusal
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    golden,
    scales,
)

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.operands.dequantize_operand import DequantizeOperand
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel

F32 = torch.float32


class Layer:
    """A linear or convolution of int8 values that are passed in with their scale.

    Args:
        scale: The shape of the scale.
        conv: A convolution instead of a linear.
        zero: Whether a zero point is subtracted, of the shape of the scale.
        quantized: Whether the weight is.
    """

    def __init__(
        self,
        scale: tuple[int, ...],
        *,
        conv: bool = False,
        zero: bool = False,
        quantized: bool = True,
    ) -> None:
        b = GraphBuilder()
        shape, weight = ((2, 4, 6, 6), (8, 4, 3, 3)) if conv else ((2, 3, 8), (5, 8))
        self.inputs = [codes(*shape), scales(*scale)]
        q, s = b.arg("q", torch.int8, *shape), b.arg("s", F32, *scale)
        value = b.call(aten._to_copy.default, q, dtype=F32)
        if zero:
            self.inputs.append(codes(*scale))
            value = b.call(aten.sub.Tensor, value, b.arg("z", torch.int8, *scale))
        x = b.call(aten.mul.Tensor, s, value)
        if quantized:
            stored, one = b.const("w", codes(*weight)), (weight[0], *(1,) * (len(weight) - 1))
            spec = str(per_channel(len(weight)))
            w = b.call(ops.dequantize, stored, b.const("t", scales(*one)), None, spec)
        else:
            w = b.const("w", torch.rand(weight))
        bias = b.const("bias", torch.rand(weight[0]))
        self.product = b.call(aten.conv2d.default if conv else aten.linear.default, x, w, bias)
        self.program = finish(b, self.product)


def test_golden_the_activation_of_a_linear() -> None:
    assert_expected_inline(
        golden(Layer((2, 3, 1)).program, DequantizeOperand()),
        """\
%q: int8[2, 3, 8]
%s: float32[2, 3, 1]
const %w: int8[5, 8]
const %t: float32[5, 1]
%0 = qfuse.dequantize(%w, %t, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 8]
const %bias: float32[5]
%1 = qfuse.dequantize(%q, %s, None, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[2, 3, 8]
%2 = aten.linear(%1, %0, %bias): float32[2, 3, 5]
return (%2)
fired: dequantize-operand 1""",
    )


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("scale", ["tensor", "rows", "features"])
def test_the_activation_of_a_layer(scale: str, conv: bool, zero: bool) -> None:
    shapes: dict[str, tuple[int, ...]] = {"tensor": (), "rows": (2, 3, 1), "features": (8,)}
    if conv:
        shapes = {"tensor": (), "rows": (2, 1, 1, 1), "features": (4, 1, 1)}
    layer = Layer(shapes[scale], conv=conv, zero=zero)

    order = {node.name: node for node in layer.program.graph.nodes if node.op == "placeholder"}
    named = dict(zip(["q", "s", "z"], layer.inputs, strict=False))
    given = [named[name] for name in order]
    assert_same_values(layer.program, given, DequantizeOperand(), exact=True)
    assert calls(layer.program).count("qfuse.dequantize") == 2


def test_refuses_the_activation_of_a_float_weight() -> None:
    result = apply_rules(Layer((), quantized=False).program, [DequantizeOperand()])
    assert (result.modified, list(result.misses)) == (False, [])


def test_refuses_a_layer_with_a_scale_of_each_element() -> None:
    miss = refusal(Layer((2, 3, 8)).program)
    assert (miss.code, miss.at.name) == (MissCode.SHAPE, "s")
