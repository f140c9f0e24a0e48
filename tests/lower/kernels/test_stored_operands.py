"""Operands of convolutions' epilogues that are stored quantized, in every float dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.cases.quantized_convolution import (
    ConvolutionCase,
    lowered_convolution,
    spec_of,
)

from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.ir.ops import library as ops
from qfuse.model_check import ModelCheck
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten

pytestmark = [pytest.mark.own_kernels, pytest.mark.numeric]

CASES = {
    "2d": ConvolutionCase(),
    "depthwise": ConvolutionCase(groups=6, out=6),
    "transposed": ConvolutionCase(transposed=True, stride=2, axis=1, output_padding=1),
    "dynamic batch": ConvolutionCase(shape=("n", 6, 9, 8)),
}


def calls_of(low: LoweredGraph) -> list[object]:
    """Return the ops that are called."""
    return [n.target for n in low.graph.nodes if n.op == "call_function"]


@pytest.mark.pairs
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32])
def test_a_stored_operand_of_another_float_dtype(
    name: str, op: torch._ops.OpOverload, other: torch.dtype, own: torch.dtype
) -> None:
    """As under autocast, where convolutions are bfloat16 and a sum with a residual float32."""
    case = CASES[name].but(float_dtype=own)
    b = GraphBuilder()
    y = case.add(b, b.arg("x", own, *case.shape))
    lead = "n" if name == "dynamic batch" else 2
    r = b.arg("r", torch.uint8, lead, *y.meta["val"].shape[1:])
    spec = replace(spec_of(4, torch.uint8), float_dtype=other)
    scale = b.const("r_scale", torch.full((1, 1, 1, 1), 0.03))
    zero = b.const("r_zero", torch.full((1, 1, 1, 1), 17, dtype=torch.int32))
    y = b.call(op, y, b.call(ops.dequantize, r, scale, zero, str(spec)))
    made = y.meta["val"].dtype
    assert made is torch.promote_types(own, other)
    out = replace(spec_of(4, torch.uint8), float_dtype=made)
    grid = b.const("o", torch.full((1, 1, 1, 1), 0.06))
    q = b.call(ops.quantize, b.call(aten.relu.default, y), grid, None, str(out))
    program = b.done(q)
    low = lowered_convolution(program)

    assert str(calls_of(low)[-1]).endswith("w8a8_quantized.default")
    inputs = random_inputs(program, n=3)
    (codes,) = run(low, inputs)
    # The source rounds to bfloat16, so it is not what the result is measured by.
    assert ModelCheck.measure(program, inputs).judge([codes]).wrong is None
    assert codes.min() + 2 < codes.max()


def test_an_operand_that_is_dequantized_to_float16_is_not_read_as_it_is_stored() -> None:
    """The source may overflow, and a kernel does not."""
    b = GraphBuilder()
    case = ConvolutionCase(float_dtype=torch.float16)
    y = case.add(b, b.arg("x", torch.float16, *case.shape))
    r = b.arg("r", torch.uint8, *y.meta["val"].shape)
    spec = replace(spec_of(4, torch.uint8), float_dtype=torch.float16)
    scale = b.const("r_scale", torch.full((1, 1, 1, 1), 300.0))
    program = b.done(b.call(aten.add.Tensor, y, b.call(ops.dequantize, r, scale, None, str(spec))))
    low = lowered_convolution(program)

    assert aten.add.Tensor in calls_of(low)
    inputs = random_inputs(program)
    inputs[1].fill_(255)
    (made,), (expected,) = run(low, inputs), run(program, inputs)
    assert expected.isinf().all()
    assert torch.equal(made, expected)
