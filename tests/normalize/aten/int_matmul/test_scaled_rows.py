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
from torch.fx.node import Argument

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.int_matmul.scaled_product import FuseScaledProduct
from qfuse.testing.build import GraphBuilder

K, N = 33, 5
SPEC = "int8[-128,127] {} float32 float32:reciprocal:round-zp int"


def linear(
    b: GraphBuilder, *rows: int | str, unit: bool = True, bias: bool = False, zero: bool = False
) -> Node:
    """Add a linear on an activation with the scale 1 and a dequantized weight."""
    q = b.arg("q", torch.int8, *rows, K)
    rank = len(rows) + 1
    one = b.const("one", torch.ones([1] * rank) if unit else torch.full([1] * rank, 0.5))
    z = b.const("z", torch.full([1] * rank, 9, dtype=torch.int32)) if zero else None
    x = b.call(ops.dequantize, q, one, z, SPEC.format("x".join("*" * rank)))
    w = b.const("w", codes(N, K))
    w = b.call(ops.dequantize, w, b.const("w_s", scales(N, 1)), None, SPEC.format("1x*"))
    operands = [b.const("b", torch.randn(N))] if bias else []
    return b.call(aten.linear.default, x, w, *operands)


def test_golden_a_scale_per_row_after_a_view() -> None:
    b = GraphBuilder()
    y = b.call(aten.view.default, linear(b, 2, "m"), (-1, N))
    scale = b.call(aten.view.default, b.arg("s", torch.float32, 2, "m", 1), (-1, 1))

    program = finish(b, b.call(aten.mul.Tensor, y, scale))

    assert_expected_inline(
        golden(program, FuseScaledProduct()),
        """\
%q: int8[2, s0, 33]
const %w: int8[5, 33]
const %w_s: float32[5, 1]
%0 = qfuse.dequantize(%w, %w_s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 33]
%s: float32[2, s0, 1]
%1 = qfuse.dequantize(%q, %s, None, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[2, s0, 33]
%2 = aten.linear(%1, %0): float32[2, s0, 5]
%3 = aten.view(%2, (-1, 5)): float32[2*s0, 5]
return (%3)
fired: fuse-scaled-product 1""",
    )


def test_golden_a_product_of_integers_that_is_emulated_in_float() -> None:
    b = GraphBuilder()
    x, w = (
        b.call(aten._to_copy.default, node, dtype=torch.float32)
        for node in (b.arg("q", torch.int8, "m", K), b.const("w", codes(N, K)))
    )
    y = b.call(aten.linear.default, x, w)
    y = b.call(aten.mul.Tensor, b.arg("s", torch.float32, "m", 1), y)

    assert_expected_inline(
        golden(finish(b, y), FuseScaledProduct()),
        """\
%q: int8[s0, 33]
const %w: int8[5, 33]
%0 = aten._to_copy(%w, dtype=float32): float32[5, 33]
%s: float32[s0, 1]
%1 = qfuse.dequantize(%q, %s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[s0, 33]
%2 = aten.linear(%1, %0): float32[s0, 5]
return (%2)
fired: fuse-scaled-product 1""",
    )


def test_refuses_an_activation_that_has_a_scale() -> None:
    b = GraphBuilder()
    y = b.call(aten.mul.Tensor, linear(b, 4, unit=False), b.arg("s", torch.float32, 4, 1))

    assert refusal(finish(b, y), FuseScaledProduct()) == (MissCode.PATTERN, "linear_default")


def test_refuses_a_cast_activation_on_a_float_weight() -> None:
    b = GraphBuilder()
    x = b.call(aten._to_copy.default, b.arg("q", torch.int8, 4, K), dtype=torch.float32)
    y = b.call(aten.linear.default, x, b.const("w", torch.randn(N, K)))
    program = finish(b, b.call(aten.mul.Tensor, y, b.arg("s", torch.float32, 4, 1)))

    assert refusal(program, FuseScaledProduct()) == (MissCode.PATTERN, "linear_default")


@pytest.mark.parametrize("shape", [(N,), (4, N)])
def test_refuses_a_factor_that_is_not_per_row(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    y = b.call(aten.mul.Tensor, linear(b, 4), b.arg("s", torch.float32, *shape))

    assert refusal(finish(b, y), FuseScaledProduct()) == (MissCode.AXIS, "s")


def test_refuses_a_bias_inside() -> None:
    b = GraphBuilder()
    y = b.call(aten.mul.Tensor, linear(b, 4, bias=True), b.arg("s", torch.float32, 4, 1))

    assert refusal(finish(b, y), FuseScaledProduct()) == (MissCode.ARGUMENT, "linear_default")


def test_refuses_a_result_that_others_read() -> None:
    b = GraphBuilder()
    y = linear(b, 4)
    program = finish(b, b.call(aten.mul.Tensor, y, b.arg("s", torch.float32, 4, 1)), y)

    assert refusal(program, FuseScaledProduct()) == (MissCode.SHARED, "linear_default")


def test_refuses_a_result_that_passes_through_float16() -> None:
    b = GraphBuilder()
    y = b.call(aten._to_copy.default, linear(b, 4), dtype=torch.float16)
    program = finish(b, b.call(aten.mul.Tensor, y, b.arg("s", torch.float32, 4, 1)))

    assert refusal(program, FuseScaledProduct()) == (MissCode.DTYPE, "mul_tensor")


@pytest.mark.parametrize("shape", [(4, 1), (), (N,)])
def test_refuses_a_linear_of_integers(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    x, w = (
        b.call(aten._to_copy.default, node, dtype=torch.int32)
        for node in (b.arg("q", torch.int8, 4, K), b.const("w", codes(N, K)))
    )
    y = b.call(aten.linear.default, x, w)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(*shape))))

    assert refusal(program, FuseScaledProduct()) == (MissCode.DTYPE, "linear_default")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_refuses_a_result_that_is_stored_as_float8(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    y = b.call(aten._to_copy.default, linear(b, 4), dtype=dtype)
    y = b.call(aten._to_copy.default, y, dtype=torch.float32)
    program = finish(b, b.call(aten.mul.Tensor, y, b.arg("s", torch.float32, 4, 1)))

    assert refusal(program, FuseScaledProduct()) == (MissCode.PATTERN, "_to_copy_default")


@pytest.mark.numeric
@pytest.mark.parametrize("spread", ["rows", "one", "number"])
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("m", [1, 6])
def test_values_agree(spread: str, zero: bool, m: int) -> None:
    b = GraphBuilder()
    y = linear(b, 2, m, zero=zero)
    inputs = [codes(2, m, K)]
    scale: Argument = 0.0123
    if spread != "number":
        shape = (2, m, 1) if spread == "rows" else (1,)
        scale = b.arg("s", torch.float32, *shape)
        inputs.append(scales(*shape))

    program = finish(b, b.call(aten.mul.Tensor, y, scale))
    result = assert_same_values(program, inputs, FuseScaledProduct())

    assert result.fired == {"fuse-scaled-product": 1}
