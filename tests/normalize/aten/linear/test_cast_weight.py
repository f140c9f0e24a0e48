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
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.linear.cast_weight import DequantizeCast
from qfuse.testing.build import GraphBuilder

K, N = 12, 5


def program_of(
    dtype: torch.dtype = torch.float32,
    zero: float | torch.Tensor | None = None,
    stored: torch.dtype = torch.int8,
    weight: Node | None = None,
    b: GraphBuilder | None = None,
) -> CapturedGraph:
    b = b or GraphBuilder()
    q = b.const("w", codes(N, K, dtype=stored)) if weight is None else weight
    w = b.call(aten._to_copy.default, q, dtype=dtype)
    if zero is not None:
        by = b.const("z", zero) if isinstance(zero, torch.Tensor) else zero
        w = b.call(aten.sub.Tensor, w, by)
    return finish(b, b.call(aten.linear.default, b.arg("x", dtype, "m", K), w))


def test_golden_a_weight_without_a_scale() -> None:
    assert_expected_inline(
        golden(program_of(zero=3), DequantizeCast()),
        """\
const %w: int8[5, 12]
%x: float32[s0, 12]
const %one_of_rank_2: float32[1, 1]
const %sub_tensor_zero_point: int32[1, 1]
%0 = qfuse.dequantize(%w, %one_of_rank_2, %sub_tensor_zero_point, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[5, 12]
%1 = aten.linear(%x, %0): float32[s0, 5]
return (%1)
fired: dequantize-cast 1""",
    )


def test_refuses_a_float_weight() -> None:
    b = GraphBuilder()
    y = b.call(aten.linear.default, b.arg("x", torch.float32, 3, K), b.const("w", torch.ones(N, K)))
    assert refusal(finish(b, y), DequantizeCast()) == (MissCode.PATTERN, y.name)


def test_refuses_a_weight_that_is_computed_at_run_time() -> None:
    b = GraphBuilder()
    program = program_of(weight=b.arg("w", torch.int8, N, K), b=b)
    assert refusal(program, DequantizeCast()) == (MissCode.NOT_CONSTANT, "w")


@pytest.mark.parametrize("zero", [0.5, 300.0])
def test_refuses_zero_points_that_are_no_8_bit_integers(zero: float) -> None:
    assert refusal(program_of(zero=zero), DequantizeCast())[0] is MissCode.ZERO_POINT


def test_refuses_a_zero_point_per_feature() -> None:
    program = program_of(zero=torch.arange(1, N + 1).reshape(N, 1).float())
    assert refusal(program, DequantizeCast())[0] is MissCode.SHAPE


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
@pytest.mark.parametrize("zero", [None, 7.0, 0.0])
def test_bits_are_the_same(dtype: torch.dtype, stored: torch.dtype, zero: float | None) -> None:
    program = program_of(dtype, zero, stored)
    x = torch.randn(3, K).to(dtype)
    fired = assert_same_values(program, [x], DequantizeCast(), exact=True).fired
    assert fired == {"dequantize-cast": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_values_have_the_same_bits(dtype: torch.dtype, stored: torch.dtype) -> None:
    b = GraphBuilder()
    q = b.const("w", torch.randn(N, K).to(stored))
    program = program_of(dtype, weight=q, b=b)
    fired = assert_same_values(program, [torch.randn(3, K).to(dtype)], DequantizeCast(), exact=True)
    assert fired.fired == {"dequantize-cast": 1}
