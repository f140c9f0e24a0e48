from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    codes,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.views.lift_transpose import LiftTranspose
from qfuse.testing.build import GraphBuilder

SPEC = "int8[-128,127] {} float32 float32:reciprocal:round-zp int"


def dequantized(b: GraphBuilder, block: str, *grid: int) -> Node:
    """Add a dequantized weight of shape ``[8, 4]``."""
    q, scale = b.const("q", codes(8, 4)), b.const("scale", scales(*grid))
    zero = b.const("zero", codes(*grid).to(torch.int32))
    return b.call(ops.dequantize, q, scale, zero, SPEC.format(block))


def test_golden_a_dequantized_weight() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 3, 8)
    w = b.call(aten._to_copy.default, dequantized(b, "2x1", 4, 4), dtype=torch.bfloat16)
    y = b.call(aten.linear.default, x, b.call(aten.t.default, w))

    assert_expected_inline(
        golden(finish(b, y), LiftTranspose()),
        """\
%x: bfloat16[3, 8]
const %zero_t: int32[4, 4]
const %q_t: int8[4, 8]
const %scale_t: float32[4, 4]
%0 = qfuse.dequantize(%q_t, %scale_t, %zero_t, 'int8[-128,127] 1x2 float32 float32:reciprocal:round-zp int'): float32[4, 8]
%1 = aten._to_copy(%0, dtype=bfloat16): bfloat16[4, 8]
%2 = aten.linear(%x, %1): bfloat16[3, 4]
return (%2)
fired: lift-transpose 1""",
    )


def test_golden_a_constant_weight() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 3, 8), b.const("w", torch.randn(8, 4))
    y = b.call(aten.linear.default, x, b.call(aten.permute.default, w, (1, 0)))

    assert_expected_inline(
        golden(finish(b, y), LiftTranspose()),
        """\
%x: float32[3, 8]
const %w_t: float32[4, 8]
%0 = aten.linear(%x, %w_t): float32[3, 4]
return (%0)
fired: lift-transpose 1""",
    )


def test_refuses_a_transpose_that_others_read() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 3, 8), b.const("w", torch.randn(8, 4))
    t = b.call(aten.t.default, w)
    program = finish(b, b.call(aten.linear.default, x, t), b.call(aten.relu.default, t))

    assert refusal(program, LiftTranspose()) == (MissCode.PATTERN, "t_default")


def test_refuses_a_weight_that_is_normalized_first() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 3, 8), b.const("w", torch.randn(8, 4))
    t = b.call(aten.t.default, b.call(aten._softmax.default, w, 0, False))
    program = finish(b, b.call(aten.linear.default, x, t))

    assert refusal(program, LiftTranspose()) == (MissCode.PATTERN, "_softmax_default")


def test_refuses_a_weight_that_is_an_input() -> None:
    b = GraphBuilder()
    x, q = b.arg("x", torch.float32, 3, 8), b.arg("q", torch.int8, 8, 4)
    w = b.call(ops.dequantize, q, b.const("scale", scales(1, 4)), None, SPEC.format("*x1"))
    program = finish(b, b.call(aten.linear.default, x, b.call(aten.t.default, w)))

    assert refusal(program, LiftTranspose()) == (MissCode.NOT_CONSTANT, "dequantize_default")


@pytest.mark.numeric
@pytest.mark.parametrize(("block", "grid"), [("*x1", (1, 4)), ("1x*", (8, 1)), ("2x1", (4, 4))])
def test_weights_are_the_same_bits(block: str, grid: tuple[int, int]) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    w = b.call(aten.t.default, dequantized(b, block, *grid))
    y = b.call(aten.linear.default, x, w)

    result = assert_same_values(finish(b, y), [torch.randn(3, 8)], LiftTranspose())

    assert result.fired == {"lift-transpose": 1}
