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
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.linear.batched_scale import LiftBatchedScale
from qfuse.testing.build import GraphBuilder

E, M, K, N = 3, 5, 64, 72


def product(  # noqa: PLR0913 - one keyword per spelling
    b: GraphBuilder,
    dtype: torch.dtype = torch.float32,
    *,
    stored: torch.dtype = torch.int8,
    turned: bool = False,
    zero: Argument = None,
    matmul: bool = False,
    rows: int = M,
) -> Node:
    """Multiply ``x [E, M, K]`` with quantized weights without their scales."""
    values = codes(E, N, K) if turned else codes(E, K, N)
    held = values.to(stored) if stored.is_floating_point else values.view(stored)
    w = b.call(aten._to_copy.default, b.const("w", held), dtype=dtype)
    w = w if zero is None else b.call(aten.sub.Tensor, w, zero)
    w = b.call(aten.transpose.int, w, 1, 2) if turned else w
    op = aten.matmul.default if matmul else aten.bmm.default
    return b.call(op, b.arg("x", dtype, E, rows, K), w)


def scaled(by: torch.Tensor, dtype: torch.dtype = torch.float32, **how: object) -> CapturedGraph:
    b = GraphBuilder()
    y = product(b, dtype, **how)  # type: ignore[arg-type]
    return finish(b, b.call(aten.mul.Tensor, y, b.const("s", by.to(dtype))))


def test_golden_a_scale_per_expert_and_output() -> None:
    assert_expected_inline(
        golden(scaled(scales(E, 1, N)), LiftBatchedScale()),
        """\
const %w: int8[3, 64, 72]
%x: float32[3, 5, 64]
const %s: float32[3, 1, 72]
%0 = qfuse.dequantize(%w, %s, None, 'int8[-128,127] 1x*x1 float32 float32:reciprocal:round-zp int'): float32[3, 64, 72]
%1 = aten.bmm(%x, %0): float32[3, 5, 72]
return (%1)
fired: lift-batched-scale 1""",
    )


def test_golden_weights_that_are_transposed() -> None:
    assert_expected_inline(
        golden(scaled(scales(N), turned=True, zero=3), LiftBatchedScale()),
        """\
const %w: int8[3, 72, 64]
%x: float32[3, 5, 64]
const %mul_tensor_zero_point: int32[1, 72, 1]
const %s_scale: float32[1, 72, 1]
%0 = qfuse.dequantize(%w, %s_scale, %mul_tensor_zero_point, 'int8[-128,127] *x1x* float32 float32:reciprocal:round-zp int'): float32[3, 72, 64]
%1 = aten.transpose.int(%0, 1, 2): float32[3, 64, 72]
%2 = aten.bmm(%x, %1): float32[3, 5, 72]
return (%2)
fired: lift-batched-scale 1""",
    )


def test_refuses_a_factor_per_row() -> None:
    program = scaled(scales(E, K, 1), rows=K)

    assert refusal(program, LiftBatchedScale()) == (MissCode.AXIS, "s")


def test_refuses_a_factor_of_the_next_rank() -> None:
    program = scaled(scales(2, 1, 1, N))

    assert refusal(program, LiftBatchedScale()) == (MissCode.DTYPE, "bmm_default")


def test_refuses_a_factor_that_is_computed_at_run_time() -> None:
    b = GraphBuilder()
    y = product(b)
    program = finish(b, b.call(aten.mul.Tensor, y, b.arg("s", torch.float32, E, 1, N)))

    assert refusal(program, LiftBatchedScale()) == (MissCode.NOT_CONSTANT, "s")


def test_refuses_weights_that_are_computed_at_run_time() -> None:
    b = GraphBuilder()
    w = b.call(aten._to_copy.default, b.arg("w", torch.int8, E, K, N), dtype=torch.float32)
    y = b.call(aten.bmm.default, b.arg("x", torch.float32, E, M, K), w)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(N))))

    assert refusal(program, LiftBatchedScale()) == (MissCode.NOT_CONSTANT, "w")


def test_refuses_a_product_with_another_user() -> None:
    b = GraphBuilder()
    y = product(b)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(N))), y)

    assert refusal(program, LiftBatchedScale()) == (MissCode.SHARED, "bmm_default")


def test_refuses_float16_where_the_unscaled_product_may_overflow() -> None:
    program = scaled(scales(N), torch.float16)

    assert refusal(program, LiftBatchedScale())[0] is MissCode.DTYPE


def test_refuses_a_factor_that_widens_the_product() -> None:
    b = GraphBuilder()
    y = product(b, torch.bfloat16)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(N))))

    assert refusal(program, LiftBatchedScale()) == (MissCode.DTYPE, "bmm_default")


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), -0.5, 1e-40])
def test_refuses_what_is_no_scale(scale: float) -> None:
    program = scaled(torch.full((E, 1, 1), scale))

    assert refusal(program, LiftBatchedScale())[0] is MissCode.RANGE


def test_refuses_a_zero_point_outside_of_the_range() -> None:
    program = scaled(scales(N), zero=300)

    assert refusal(program, LiftBatchedScale())[0] is MissCode.ZERO_POINT


def test_refuses_a_zero_point_of_floats() -> None:
    program = scaled(scales(N), stored=torch.float8_e4m3fn, zero=3)

    assert refusal(program, LiftBatchedScale()) == (MissCode.ZERO_POINT, "w")


@pytest.mark.numeric
def test_an_activation_that_is_broadcast() -> None:
    b = GraphBuilder()
    w = b.call(aten._to_copy.default, b.const("w", codes(E, K, N)), dtype=torch.float32)
    y = b.call(aten.matmul.default, b.arg("x", torch.float32, 1, M, K), w)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(E, 1, N))))

    assert assert_same_values(program, [torch.randn(1, M, K)], LiftBatchedScale()).fired


def test_refuses_small_weights() -> None:
    b = GraphBuilder()
    w = b.call(aten._to_copy.default, b.const("w", codes(E, 8, 8)), dtype=torch.float32)
    y = b.call(aten.bmm.default, b.arg("x", torch.float32, E, M, 8), w)
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(8))))

    assert refusal(program, LiftBatchedScale()) == (MissCode.PROFIT, "bmm_default")


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("grid", [(), (1,), (N,), (1, N), (E, 1, N), (E, 1, 1)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("matmul", [False, True])
@pytest.mark.parametrize("zero", [None, 7])
def test_values_are_those_of_the_scaled_product(
    dtype: torch.dtype,
    stored: torch.dtype,
    grid: tuple[int, ...],
    turned: bool,
    matmul: bool,
    zero: int | None,
) -> None:
    shift = None if stored.is_floating_point else zero
    program = scaled(
        scales(*grid or (1,)).reshape(grid),
        dtype,
        stored=stored,
        turned=turned,
        matmul=matmul,
        zero=shift,
    )

    result = assert_same_values(program, [torch.randn(E, M, K).to(dtype)], LiftBatchedScale())

    assert result.fired == {"lift-batched-scale": 1}


@pytest.mark.numeric
def test_a_number_is_a_scale() -> None:
    b = GraphBuilder()
    program = finish(b, b.call(aten.mul.Tensor, product(b), 0.02))

    result = assert_same_values(program, [torch.randn(E, M, K)], LiftBatchedScale())

    assert result.fired == {"lift-batched-scale": 1}
