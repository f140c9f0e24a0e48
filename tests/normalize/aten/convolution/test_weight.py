from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.normalize.aten.convolution.weight import DequantizeWeight
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32 = torch.float32


def integers(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """All values of the dtype, in turn."""
    info = torch.iinfo(dtype)
    count = torch.Size(shape).numel()
    return torch.arange(count).mul(37).remainder(256).add(info.min).to(dtype).view(shape)


def convolution(weight: Callable[[GraphBuilder], Node], dtype: torch.dtype = F32) -> NormalGraph:
    """A convolution of three channels with the weight that the function makes."""
    b = GraphBuilder()
    x = b.arg("x", dtype, "m", 4, 6, 5)
    return b.done(b.call(aten.conv2d.default, x, weight(b), None, [1, 1], [1, 1]))


def cast(b: GraphBuilder, q: Node, dtype: torch.dtype = F32) -> Node:
    """Cast quantized values."""
    return b.call(aten._to_copy.default, q, dtype=dtype)


def dequantized(program: NormalGraph) -> PassResult:
    """Apply the rule; every bit must stay the same."""
    source = clone(program)
    result = apply_rules(program, [DequantizeWeight()])
    inputs = random_inputs(program, m=3)
    assert bits_same(run(program, inputs), run(source, inputs))
    return result


def test_golden_a_cast_weight_is_dequantized_with_the_scale_1() -> None:
    program = convolution(lambda b: cast(b, b.const("w", integers(3, 4, 3, 3))))

    assert dequantized(program).fired == {"dequantize-weight": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 4, 6, 5]
const %w: int8[3, 4, 3, 3]
const %one_of_rank_4: float32[1, 1, 1, 1]
%0 = qfuse.dequantize(%w, %one_of_rank_4, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[3, 4, 3, 3]
%1 = aten.conv2d(%x, %0, None, (1, 1), (1, 1)): float32[s0, 3, 6, 5]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float64, F32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("zero", [None, 0, 117, torch.tensor(-128), torch.tensor([255.0])], ids=str)
def test_every_dtype_keeps_its_bits(
    dtype: torch.dtype, stored: torch.dtype, zero: int | torch.Tensor | None
) -> None:
    def weight(b: GraphBuilder) -> Node:
        w = cast(b, b.const("w", integers(3, 4, 3, 3, dtype=stored)), dtype)
        if zero is None:
            return w
        known = b.const("z", zero.to(dtype)) if isinstance(zero, torch.Tensor) else zero
        return b.call(aten.sub.Tensor, w, known)

    program = convolution(weight, dtype)
    info = torch.iinfo(stored)
    fits = zero is None or info.min <= int(zero) <= info.max
    assert dequantized(program).fired == ({"dequantize-weight": 1} if fits else {})


def test_one_weight_of_two_convolutions_is_dequantized_once() -> None:
    b = GraphBuilder()
    w = cast(b, b.const("w", integers(4, 4, 3, 3)))
    x = b.call(aten.conv2d.default, b.arg("x", F32, "m", 4, 6, 5), w, None, [1, 1], [1, 1])
    program = b.done(b.call(aten.conv2d.default, x, w))

    assert dequantized(program).fired == {"dequantize-weight": 1}


def _per_channel(b: GraphBuilder) -> Node:
    w = cast(b, b.const("w", integers(3, 4, 3, 3)))
    return b.call(aten.sub.Tensor, w, b.const("z", integers(3, 1, 1, 1).float() + 0.5))


@pytest.mark.parametrize(
    ("weight", "code"),
    [
        (lambda b: b.const("w", torch.randn(3, 4, 3, 3)), MissCode.PATTERN),
        (lambda b: cast(b, b.arg("w", torch.int8, 3, 4, 3, 3)), MissCode.NOT_CONSTANT),
        (lambda b: cast(b, b.const("w", integers(3, 4, 3, 3).to(torch.int16))), MissCode.PATTERN),
        (
            lambda b: cast(b, b.const("w", torch.ones(3, 4, 3, 3).to(torch.float8_e4m3fn))),
            MissCode.DTYPE,
        ),
        (
            lambda b: b.call(
                aten.view.default, cast(b, b.const("w", integers(12, 9))), (3, 4, 3, 3)
            ),
            MissCode.PATTERN,
        ),
        (_per_channel, MissCode.ZERO_POINT),
        (
            lambda b: b.call(
                aten.sub.Tensor, cast(b, b.const("w", integers(3, 4, 3, 3))), b.arg("z", F32)
            ),
            MissCode.NOT_CONSTANT,
        ),
    ],
    ids=["float", "run time", "int16", "float8", "view", "fraction", "run-time zero point"],
)
def test_refuses(weight: Callable[[GraphBuilder], Node], code: MissCode) -> None:
    program = convolution(weight)
    (node,) = program.graph.find_nodes(op="call_function", target=aten.conv2d.default)

    miss = DequantizeWeight().match(node)
    assert isinstance(miss, Miss)
    assert miss.code is code
