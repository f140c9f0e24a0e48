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


def product(b: GraphBuilder, x: Node, dtype: torch.dtype | None = torch.float32) -> Node:
    """Add ``mm(int32(x), int32(t(w)))`` and a cast."""
    left = b.call(aten._to_copy.default, x, dtype=torch.int32)
    t = b.call(aten.t.default, b.const("w", codes(N, K)))
    y = b.call(aten.mm.default, left, b.call(aten._to_copy.default, t, dtype=torch.int32))
    return y if dtype is None else b.call(aten._to_copy.default, y, dtype=dtype)


def test_golden_a_scale_per_row_goes_to_the_activation_that_was_quantized() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", "s", K)
    choose = "ao-symmetric int8[-127,127] 1x1x* eps=1e-07 float32 int8"
    scale = b.item(b.call(ops.choose_qparams, x, choose), 0)
    spec = "int8[-127,127] 1x1x* float32 float32:reciprocal:round-zp int"
    q = b.call(ops.quantize, x, scale, None, spec)
    y = product(b, b.call(aten.view.default, q, (-1, K)))
    y = b.call(aten.mul.Tensor, y, b.call(aten.view.default, scale, (-1, 1)))

    assert_expected_inline(
        golden(finish(b, y), FuseScaledProduct()),
        """\
%x: float32[s0, s1, 33]
%0 = qfuse.choose_qparams(%x, 'ao-symmetric int8[-127,127] 1x1x* eps=1e-07 float32 int8'): (float32[s0, s1, 1], int8[s0, s1, 1])
%1 = getitem(%0, 0): float32[s0, s1, 1]
%2 = qfuse.quantize(%x, %1, None, 'int8[-127,127] 1x1x* float32 float32:reciprocal:round-zp int'): int8[s0, s1, 33]
const %w: int8[5, 33]
%3 = qfuse.dequantize(%2, %1, None, 'int8[-127,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[s0, s1, 33]
const %one_of_rank_2: float32[1, 1]
%4 = qfuse.dequantize(%w, %one_of_rank_2, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[5, 33]
%5 = aten.linear(%3, %4): float32[s0, s1, 5]
%6 = aten.view(%5, (-1, 5)): float32[s1*s0, 5]
return (%6)
fired: fuse-scaled-product 1""",
    )


def test_golden_a_scale_per_feature_goes_to_the_weight() -> None:
    b = GraphBuilder()
    y = product(b, b.arg("x", torch.int8, 3, K), torch.bfloat16)
    y = b.call(aten.mul.Tensor, b.const("s", scales(N)), y)

    assert_expected_inline(
        golden(finish(b, y), FuseScaledProduct()),
        """\
%x: int8[3, 33]
const %w: int8[5, 33]
const %one_of_rank_2: float32[1, 1]
%0 = qfuse.dequantize(%x, %one_of_rank_2, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[3, 33]
const %s_scale: float32[5, 1]
%1 = qfuse.dequantize(%w, %s_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 33]
%2 = aten.linear(%0, %1): float32[3, 5]
return (%2)
fired: fuse-scaled-product 1""",
    )


def test_golden_both_scales_were_multiplied_first() -> None:
    b = GraphBuilder()
    y = product(b, b.arg("x", torch.int8, "m", K), None)
    both = b.call(aten.mul.Tensor, b.const("w_s", scales(N)), b.arg("s", torch.float32, "m", 1))

    program = finish(b, b.call(aten.mul.Tensor, y, both))

    assert_expected_inline(
        golden(program, FuseScaledProduct()),
        """\
%x: int8[s0, 33]
const %w: int8[5, 33]
%s: float32[s0, 1]
%0 = qfuse.dequantize(%x, %s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[s0, 33]
const %w_s_scale: float32[5, 1]
%1 = qfuse.dequantize(%w, %w_s_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 33]
%2 = aten.linear(%0, %1): float32[s0, 5]
return (%2)
fired: fuse-scaled-product 1""",
    )


def test_golden_an_activation_that_is_shifted_and_scaled_by_numbers() -> None:
    b = GraphBuilder()
    left = b.call(aten._to_copy.default, b.arg("x", torch.uint8, "m", K), dtype=torch.int32)
    t = b.call(aten._to_copy.default, b.const("w", codes(K, N)), dtype=torch.int32)
    y = b.call(aten.mm.default, b.call(aten.sub.Tensor, left, 119), t)

    program = finish(b, b.call(aten.mul.Tensor, y, 0.03))

    assert_expected_inline(
        golden(program, FuseScaledProduct()),
        """\
%x: uint8[s0, 33]
const %x_zero_point: int32[1, 1]
const %x_scale: float32[1, 1]
%0 = qfuse.dequantize(%x, %x_scale, %x_zero_point, 'uint8[0,255] *x* float32 float32:reciprocal:round-zp int'): float32[s0, 33]
const %w_t: int8[5, 33]
const %one_of_rank_2: float32[1, 1]
%1 = qfuse.dequantize(%w_t, %one_of_rank_2, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[5, 33]
%2 = aten.linear(%0, %1): float32[s0, 5]
return (%2)
fired: fuse-scaled-product 1""",
    )


@pytest.mark.parametrize("shape", [(3, N), (2, 3, N), (2, 1, 1)])
def test_refuses_a_factor_that_is_no_scale_of_either_operand(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    y = product(b, b.arg("x", torch.int8, 3, K))
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(*shape))))

    assert refusal(program, FuseScaledProduct()) == (MissCode.AXIS, "s")


def test_refuses_a_scale_per_feature_that_is_computed_at_run_time() -> None:
    b = GraphBuilder()
    y = product(b, b.arg("x", torch.int8, 3, K))
    program = finish(b, b.call(aten.mul.Tensor, y, b.arg("s", torch.float32, N)))

    assert refusal(program, FuseScaledProduct()) == (MissCode.NOT_CONSTANT, "s")


def test_refuses_integers_that_others_read() -> None:
    b = GraphBuilder()
    y = product(b, b.arg("x", torch.int8, 3, K), None)
    scaled = b.call(aten.mul.Tensor, b.call(aten._to_copy.default, y, dtype=torch.float32), 0.1)

    assert refusal(finish(b, scaled, y), FuseScaledProduct()) == (MissCode.SHARED, "mm_default")


def test_refuses_integers_that_overflow_in_float16() -> None:
    b = GraphBuilder()
    y = product(b, b.arg("x", torch.int8, 3, K), torch.float16)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(N))))

    assert refusal(program, FuseScaledProduct()) == (MissCode.DTYPE, "mul_tensor")


def test_refuses_an_integer_factor() -> None:
    b = GraphBuilder()
    y = product(b, b.arg("x", torch.int8, 3, K))
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", codes(N).to(torch.int32))))

    assert refusal(program, FuseScaledProduct()) == (MissCode.DTYPE, "s")


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 1e37, 1e-39])
def test_refuses_scales_that_leave_the_range_of_float32(scale: float) -> None:
    for shape in [(N,), (1, 1)]:
        b = GraphBuilder()
        y = product(b, b.arg("x", torch.int8, 3, K))
        s = torch.full(shape, scale)
        program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", s)))

        assert refusal(program, FuseScaledProduct()) == (MissCode.RANGE, "mul_tensor")


def test_refuses_a_weight_that_is_an_input() -> None:
    b = GraphBuilder()
    left, right = (
        b.call(aten._to_copy.default, b.arg(name, torch.int8, *shape), dtype=torch.int32)
        for name, shape in (("x", (3, K)), ("w", (K, N)))
    )
    y = b.call(aten.mul.Tensor, b.call(aten.mm.default, left, right), 0.1)

    assert refusal(finish(b, y), FuseScaledProduct()) == (MissCode.PATTERN, "mm_default")


def test_refuses_blocks_that_differ_between_scale_and_zero_point() -> None:
    b = GraphBuilder()
    left = b.call(aten._to_copy.default, b.arg("x", torch.int8, 3, K), dtype=torch.int32)
    left = b.call(aten.sub.Tensor, left, b.arg("z", torch.int8, 3, 1))
    t = b.call(aten._to_copy.default, b.const("w", codes(K, N)), dtype=torch.int32)
    y = b.call(aten.mul.Tensor, b.call(aten.mm.default, left, t), 0.1)

    assert refusal(finish(b, y), FuseScaledProduct()) == (MissCode.SHAPE, "mm_default")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_refuses_integers_that_are_stored_as_float8(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    y = product(b, b.arg("x", torch.int8, 3, K), dtype)
    y = b.call(aten._to_copy.default, y, dtype=torch.float32)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(N))))

    assert refusal(program, FuseScaledProduct()) == (MissCode.PATTERN, "_to_copy_default_2")


def test_refuses_an_activation_that_is_cast_to_bool_on_the_way() -> None:
    b = GraphBuilder()
    x = b.call(aten._to_copy.default, b.arg("x", torch.int8, 3, K), dtype=torch.bool)
    y = b.call(aten.mul.Tensor, product(b, x), b.const("s", scales(N)))

    assert refusal(finish(b, y), FuseScaledProduct()) == (MissCode.PATTERN, "mm_default")


@pytest.mark.parametrize("zero", [2**31, -(2**40)])
def test_refuses_a_zero_point_that_no_tensor_of_zero_points_holds(zero: int) -> None:
    b = GraphBuilder()
    x = b.call(aten._to_copy.default, b.arg("x", torch.int8, 3, K), dtype=torch.int64)
    x = b.call(aten.sub.Tensor, x, zero)
    w = b.call(aten._to_copy.default, b.const("w", codes(K, N)), dtype=torch.int64)
    y = b.call(aten._to_copy.default, b.call(aten.mm.default, x, w), dtype=torch.float32)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(N))))

    assert refusal(program, FuseScaledProduct())[0] is MissCode.ZERO_POINT


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("spread", ["rows", "features", "tensor", "number", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, None])
@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("view", [True, False])
def test_values_agree(spread: str, dtype: torch.dtype | None, m: int, view: bool) -> None:
    b = GraphBuilder()
    rows = (2, m) if view else (2 * m,)
    x = b.arg("x", torch.int8, *rows, K)
    inputs = [codes(*rows, K)]
    flat = b.call(aten.view.default, x, (-1, K)) if view else x
    y = b.call(aten.view.default, product(b, flat, dtype), (*rows, N))

    def row_scale() -> Node:
        inputs.append(scales(*rows, 1))
        return b.arg("x_scale", torch.float32, *rows, 1)

    match spread:
        case "rows":
            scale: Argument = row_scale()
        case "features":
            scale = b.const("s", scales(N))
        case "tensor":
            scale = b.const("s", scales(1, 1))
        case "number":
            scale = 0.0123
        case _:
            scale = b.call(aten.mul.Tensor, row_scale(), b.const("s", scales(N)))
    program = finish(b, b.call(aten.mul.Tensor, y, scale))

    result = assert_same_values(program, inputs, FuseScaledProduct())

    assert result.fired == {"fuse-scaled-product": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("zero", ["number", "rows", "one"])
def test_values_with_a_zero_point_agree(zero: str) -> None:
    b = GraphBuilder()
    x, scale = b.arg("x", torch.uint8, 4, K), b.arg("s", torch.float32, 4, 1)
    inputs = [codes(4, K, dtype=torch.uint8), scales(4, 1)]
    z: Argument = 131
    if zero == "rows":
        z = b.arg("z", torch.uint8, 4, 1)
        inputs.append(codes(4, 1, dtype=torch.uint8))
    elif zero == "one":
        z = b.const("z", torch.tensor([140], dtype=torch.int32))
    left = b.call(aten._to_copy.default, x, dtype=torch.int32)
    t = b.call(aten._to_copy.default, b.const("w", codes(K, N)), dtype=torch.int32)
    y = b.call(aten.mm.default, b.call(aten.sub.Tensor, left, z), t)

    program = finish(b, b.call(aten.mul.Tensor, y, scale))
    result = assert_same_values(program, inputs, FuseScaledProduct())

    assert result.fired == {"fuse-scaled-product": 1}
