from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    finish,
    golden,
    refusal,
    whole,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.linear.bias import FuseBias
from qfuse.testing.build import GraphBuilder


def linear(b: GraphBuilder, *rows: int | str, dtype: torch.dtype = torch.float32) -> Node:
    """Add a linear without a bias from 8 to 4 features."""
    x = b.arg("x", dtype, *rows, 8)
    return b.call(aten.linear.default, x, b.const("w", torch.randn(4, 8).to(dtype)))


def test_golden_a_bias_after_a_view() -> None:
    b = GraphBuilder()
    y = b.call(aten.view.default, linear(b, 6), (2, 3, 4))
    y = b.call(aten.add.Tensor, b.const("b", torch.randn(4)), y)

    assert_expected_inline(
        golden(finish(b, y), FuseBias()),
        """\
%x: float32[6, 8]
const %w: float32[4, 8]
const %b: float32[4]
%0 = aten.linear(%x, %w, %b): float32[6, 4]
%1 = aten.view(%0, (2, 3, 4)): float32[2, 3, 4]
return (%1)
fired: fuse-bias 1""",
    )


def test_golden_a_narrower_bias_is_widened_once() -> None:
    b = GraphBuilder()
    bias = b.const("b", torch.randn(1, 1, 4, dtype=torch.bfloat16))
    y = b.call(aten.add.Tensor, linear(b, 2, "m"), bias)

    assert_expected_inline(
        golden(finish(b, y), FuseBias()),
        """\
%x: float32[2, s0, 8]
const %w: float32[4, 8]
const %b_bias: float32[4]
%0 = aten.linear(%x, %w, %b_bias): float32[2, s0, 4]
return (%0)
fired: fuse-bias 1""",
    )


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (3, 4), (2, 1, 4)])
def test_refuses_what_is_not_one_number_per_feature(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    y = b.call(aten.add.Tensor, linear(b, 2, 3), b.const("b", torch.randn(shape)))

    assert refusal(finish(b, y), FuseBias()) == (MissCode.SHAPE, "b")


def test_refuses_a_residual() -> None:
    b = GraphBuilder()
    y = b.call(aten.add.Tensor, linear(b, 3), b.arg("r", torch.float32, 3, 4))

    assert refusal(finish(b, y), FuseBias()) == (MissCode.SHAPE, "r")


def test_refuses_a_number() -> None:
    b = GraphBuilder()
    y = b.call(aten.add.Tensor, linear(b, 3), 1.0)

    assert refusal(finish(b, y), FuseBias()) == (MissCode.ARGUMENT, "add_tensor")


def test_refuses_a_bias_that_is_an_input() -> None:
    b = GraphBuilder()
    y = b.call(aten.add.Tensor, linear(b, 3), b.arg("b", torch.float32, 4))

    assert refusal(finish(b, y), FuseBias()) == (MissCode.NOT_CONSTANT, "b")


def test_refuses_a_scaled_summand() -> None:
    b = GraphBuilder()
    y = b.call(aten.add.Tensor, linear(b, 3), b.const("b", torch.randn(4)), alpha=2)

    assert refusal(finish(b, y), FuseBias()) == (MissCode.ARGUMENT, "add_tensor")


def test_refuses_a_second_bias() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 3, 8), b.const("w", torch.randn(4, 8))
    bias = b.const("b", torch.randn(4))
    y = b.call(aten.add.Tensor, b.call(aten.linear.default, x, w, bias), bias)

    assert refusal(finish(b, y), FuseBias()) == (MissCode.ARGUMENT, "linear_default")


def test_refuses_a_bias_that_makes_the_sum_wider() -> None:
    b = GraphBuilder()
    y = b.call(aten.add.Tensor, linear(b, 3, dtype=torch.bfloat16), b.const("b", torch.randn(4)))

    assert refusal(finish(b, y), FuseBias()) == (MissCode.DTYPE, "add_tensor")


def test_refuses_a_linear_that_others_read() -> None:
    b = GraphBuilder()
    y = linear(b, 3)
    program = finish(b, b.call(aten.add.Tensor, y, b.const("b", torch.randn(4))), y)

    assert refusal(program, FuseBias()) == (MissCode.SHARED, "linear_default")


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 7])
def test_values_agree(dtype: torch.dtype, n: int) -> None:
    for exact in (True, False):
        make = whole if exact else torch.randn
        b = GraphBuilder()
        x = b.arg("x", dtype, "b", "s", 33)
        y = b.call(aten.linear.default, x, b.const("w", make(n, 33).to(dtype)))
        y = b.call(aten.view.default, y, (-1, n))
        y = b.call(aten.add.Tensor, y, b.const("b", make(1, n).to(dtype)))

        inputs = [make(2, 5, 33).to(dtype)]
        # In bfloat16 a sum of whole numbers may still be rounded before the bias is added.
        result = assert_same_values(
            finish(b, y), inputs, FuseBias(), exact=exact and dtype is torch.float32
        )

        assert result.fired == {"fuse-bias": 1}
