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
from qfuse.normalize.aten.int_matmul.scaled_product import FuseScaledProduct
from qfuse.testing.build import GraphBuilder

K, N = 33, 6


def product(
    b: GraphBuilder,
    *rows: int | str,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    stored: torch.dtype = torch.int8,
    n: int = N,
) -> Node:
    """Add a linear on a stored weight that is merely cast."""
    x = b.arg("x", dtype, *rows, K)
    q = codes(n, K) if not stored.is_floating_point else torch.randn(n, K) * 40
    w = b.call(aten._to_copy.default, b.const("q", q.to(stored)), dtype=dtype)
    operands = [b.const("b", torch.randn(n).to(dtype))] if bias else []
    return b.call(aten.linear.default, x, w, *operands)


def test_golden_a_scale_per_feature_after_a_view() -> None:
    b = GraphBuilder()
    y = b.call(aten.view.default, product(b, 2, "m"), (-1, N))
    y = b.call(aten.mul.Tensor, b.const("s", scales(N)), y)

    assert_expected_inline(
        golden(finish(b, y), FuseScaledProduct()),
        """\
%x: float32[2, s0, 33]
const %q: int8[6, 33]
const %s_scale: float32[6, 1]
%0 = qfuse.dequantize(%q, %s_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[6, 33]
%1 = aten.linear(%x, %0): float32[2, s0, 6]
%2 = aten.view(%1, (-1, 6)): float32[2*s0, 6]
return (%2)
fired: fuse-scaled-product 1""",
    )


def test_golden_a_number_and_a_bias_inside() -> None:
    b = GraphBuilder()
    y = b.call(aten.mul.Tensor, product(b, 3, bias=True), 0.02)
    program = finish(b, y)
    bias = program.module.get_buffer("b")

    assert_expected_inline(
        golden(program, FuseScaledProduct()),
        """\
%x: float32[3, 33]
const %q: int8[6, 33]
const %mul_tensor_scale: float32[1, 1]
%0 = qfuse.dequantize(%q, %mul_tensor_scale, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[6, 33]
const %b_scaled: float32[6]
%1 = aten.linear(%x, %0, %b_scaled): float32[3, 6]
return (%1)
fired: fuse-scaled-product 1""",
    )
    assert torch.equal(program.module.get_buffer("b_scaled"), bias * 0.02)


def test_golden_a_zero_point_inside_and_a_wider_result() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 3, K)
    w = b.call(aten._to_copy.default, b.const("q", codes(N, K)), dtype=torch.bfloat16)
    w = b.call(aten.sub.Tensor, w, b.const("z", torch.full((N, 1), 7.0, dtype=torch.bfloat16)))
    y = b.call(aten._to_copy.default, b.call(aten.linear.default, x, w), dtype=torch.float32)
    y = b.call(aten.mul.Tensor, y, b.const("s", scales(1, N)))

    assert_expected_inline(
        golden(finish(b, y), FuseScaledProduct()),
        """\
%x: bfloat16[3, 33]
const %q: int8[6, 33]
const %z_zero_point: int32[6, 1]
const %s_scale: float32[6, 1]
%0 = qfuse.dequantize(%q, %s_scale, %z_zero_point, 'int8[-128,127] 1x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[6, 33]
%1 = aten.linear(%x, %0): bfloat16[3, 6]
%2 = aten._to_copy(%1, dtype=float32): float32[3, 6]
return (%2)
fired: fuse-scaled-product 1""",
    )


def test_golden_a_scale_of_the_right_shape_stays_the_same_constant() -> None:
    b = GraphBuilder()
    s = b.const("s", scales(N, 1))
    y = b.call(aten.mul.Tensor, product(b, 3), b.call(aten.view.default, s, (N,)))

    assert_expected_inline(
        golden(finish(b, y), FuseScaledProduct()),
        """\
%x: float32[3, 33]
const %q: int8[6, 33]
const %s: float32[6, 1]
%0 = qfuse.dequantize(%q, %s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[6, 33]
%1 = aten.linear(%x, %0): float32[3, 6]
return (%1)
fired: fuse-scaled-product 1""",
    )


@pytest.mark.parametrize("shape", [(N, 1), (N, N), (2, 1, N), (2, N, 1)])
def test_refuses_a_scale_along_another_axis(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    program = finish(b, b.call(aten.mul.Tensor, product(b, 2, N), b.const("s", scales(*shape))))

    assert refusal(program, FuseScaledProduct()) == (MissCode.AXIS, "s")


def test_refuses_a_scale_that_is_an_input() -> None:
    b = GraphBuilder()
    program = finish(b, b.call(aten.mul.Tensor, product(b, 3), b.arg("s", torch.float32, N)))

    assert refusal(program, FuseScaledProduct()) == (MissCode.NOT_CONSTANT, "s")


def test_refuses_a_bias_that_is_computed_at_run_time() -> None:
    b = GraphBuilder()
    x, bias = b.arg("x", torch.float32, 3, K), b.arg("b", torch.float32, N)
    w = b.call(aten._to_copy.default, b.const("q", codes(N, K)), dtype=torch.float32)
    y = b.call(aten.mul.Tensor, b.call(aten.linear.default, x, w, bias), 0.5)

    assert refusal(finish(b, y), FuseScaledProduct()) == (MissCode.NOT_CONSTANT, "b")


@pytest.mark.parametrize("user", ["linear", "view"])
def test_refuses_an_unscaled_result_that_others_read(user: str) -> None:
    b = GraphBuilder()
    linear = product(b, 6)
    view = b.call(aten.view.default, linear, (2, 3, N))
    y = b.call(aten.mul.Tensor, view, b.const("s", scales(N)))
    program = finish(b, y, linear if user == "linear" else view)

    assert refusal(program, FuseScaledProduct()) == (MissCode.SHARED, f"{user}_default")


def test_refuses_a_float_weight() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 3, K), b.const("w", torch.randn(N, K))
    y = b.call(aten.mul.Tensor, b.call(aten.linear.default, x, w), b.const("s", scales(N)))

    assert refusal(finish(b, y), FuseScaledProduct()) == (MissCode.PATTERN, "linear_default")


def test_refuses_a_stored_weight_that_is_an_input() -> None:
    b = GraphBuilder()
    x, q = b.arg("x", torch.float32, 3, K), b.arg("q", torch.int8, N, K)
    w = b.call(aten._to_copy.default, q, dtype=torch.float32)
    y = b.call(aten.mul.Tensor, b.call(aten.linear.default, x, w), b.const("s", scales(N)))

    assert refusal(finish(b, y), FuseScaledProduct()) == (MissCode.PATTERN, "linear_default")


@pytest.mark.parametrize("zero", [0.5, 300.0])
def test_refuses_a_zero_point_that_is_no_stored_number(zero: float) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, K)
    w = b.call(aten._to_copy.default, b.const("q", codes(N, K)), dtype=torch.float32)
    y = b.call(aten.linear.default, x, b.call(aten.sub.Tensor, w, zero))
    program = finish(b, b.call(aten.mul.Tensor, y, 0.02))

    assert refusal(program, FuseScaledProduct()) == (MissCode.ZERO_POINT, "mul_tensor")


@pytest.mark.parametrize("scale", [1e-6, 2e3, float("inf"), float("nan")])
def test_refuses_weights_that_float16_cannot_hold(scale: float) -> None:
    b = GraphBuilder()
    y = b.call(aten.mul.Tensor, product(b, 3, dtype=torch.float16), scale)

    assert refusal(finish(b, y), FuseScaledProduct()) == (MissCode.RANGE, "mul_tensor")


def test_refuses_a_result_that_passes_through_float16() -> None:
    b = GraphBuilder()
    y = b.call(aten._to_copy.default, product(b, 3), dtype=torch.float16)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(N))))

    assert refusal(program, FuseScaledProduct()) == (MissCode.DTYPE, "mul_tensor")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_refuses_a_result_that_is_stored_as_float8(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    y = b.call(aten._to_copy.default, product(b, 3), dtype=dtype)
    y = b.call(aten._to_copy.default, y, dtype=torch.float32)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(N))))

    assert refusal(program, FuseScaledProduct()) == (MissCode.PATTERN, "_to_copy_default_1")


def test_refuses_float8_of_which_only_the_integer_part_is_used() -> None:
    b = GraphBuilder()
    x, q = b.arg("x", torch.float32, 3, K), b.const("q", torch.rand(N, K).to(torch.float8_e5m2))
    w = b.call(aten._to_copy.default, q, dtype=torch.int32)
    w = b.call(aten._to_copy.default, w, dtype=torch.float32)
    y = b.call(aten.linear.default, x, w)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(N))))

    assert refusal(program, FuseScaledProduct()) == (MissCode.PATTERN, "linear_default")


# Noise is compared as a root mean square, which a handful of numbers does not have.
MANY = 128
SPELLINGS = ["vector", "row", "one", "scalar", "number", "integer"]


def factor(b: GraphBuilder, spelling: str, dtype: torch.dtype) -> Argument:
    """Return a scale in one of its spellings."""
    match spelling:
        case "vector":
            return b.const("s", scales(MANY).to(dtype))
        case "row":
            return b.const("s", scales(1, 1, MANY))
        case "one":
            return b.const("s", scales(1).to(dtype))
        case "scalar":
            return b.const("s", scales(1).reshape(()))
        case "number":
            return 0.0123
        case _:
            return 3


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_values_agree(spelling: str, dtype: torch.dtype, bias: bool) -> None:
    for rows in [(1, 1), (2, 5)]:
        b = GraphBuilder()
        y = product(b, "b", "s", dtype=dtype, bias=bias, n=MANY)
        program = finish(b, b.call(aten.mul.Tensor, y, factor(b, spelling, dtype)))

        inputs = [torch.randn(*rows, K).to(dtype)]
        result = assert_same_values(program, inputs, FuseScaledProduct())

        assert result.fired == {"fuse-scaled-product": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_values_of_other_stored_types_agree(stored: torch.dtype) -> None:
    b = GraphBuilder()
    y = product(b, 5, stored=stored, dtype=torch.bfloat16, n=MANY)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(MANY))))

    result = assert_same_values(program, [torch.randn(5, K).bfloat16()], FuseScaledProduct())

    assert result.fired == {"fuse-scaled-product": 1}
