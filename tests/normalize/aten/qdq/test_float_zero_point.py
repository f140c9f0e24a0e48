from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.qdq.float_zero_point import FloatZero
from qfuse.testing.build import GraphBuilder

K, N, GROUP = 24, 5, 8
FORMS = ("repeated", "views", "rows", "channel")


def program_of(
    form: str = "repeated",
    *,
    dtype: torch.dtype = torch.float32,
    top: int = 15,
    zero: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    run_time: bool = False,
) -> CapturedGraph:
    """``x @ ((q - z) * s).T`` with one scale and fractional zero point per group."""
    b = GraphBuilder()
    values = torch.randint(0, top + 1, (N, K), dtype=torch.uint8)
    held = scales(N, K // GROUP) if scale is None else scale
    points = torch.rand(N, K // GROUP) * 9 + 0.25 if zero is None else zero
    if form == "channel":
        held, points = held[:, :1].contiguous(), points[:, :1].contiguous()
    if form == "rows":
        held, points = held.reshape(-1, 1), points.reshape(-1, 1)
    q, s = b.const("q", values), b.const("s", held.to(dtype))
    z = b.arg("z", dtype, *points.shape) if run_time else b.const("z", points.to(dtype))
    shape = {"views": [N, K // GROUP, GROUP], "rows": [-1, GROUP]}.get(form)
    q = q if shape is None else b.call(aten.view.default, q, shape)

    def spread(node: Node) -> Node:
        if form == "repeated":
            return b.call(aten.repeat_interleave.self_int, node, GROUP, 1)
        return b.call(aten.unsqueeze.default, node, -1) if form == "views" else node

    real = b.call(aten.sub.Tensor, b.call(aten._to_copy.default, q, dtype=dtype), spread(z))
    w = b.call(aten.mul.Tensor, real, spread(s))
    w = w if shape is None else b.call(aten.view.default, w, [N, K])
    return finish(b, b.call(aten.linear.default, b.arg("x", dtype, 3, K), w))


def test_golden_groups() -> None:
    assert_expected_inline(
        golden(program_of(), FloatZero()),
        """\
const %q_stored: int8[5, 24]
const %q_scale: float32[5, 3]
const %q_offset: float32[5, 3]
%0 = qfuse.dequantize(%q_stored, %q_scale, %q_offset, 'int8[0,15] 1x8 float32 float32:reciprocal:round-zp float_offset'): float32[5, 24]
%x: float32[3, 24]
%1 = aten.linear(%x, %0): float32[3, 5]
return (%1)
fired: float-zero-point 1""",
    )


def test_golden_views_of_groups() -> None:
    assert_expected_inline(
        golden(program_of("views"), FloatZero()),
        """\
const %q: uint8[5, 24]
%0 = aten.view(%q, (5, 3, 8)): uint8[5, 3, 8]
const %q_scale: float32[5, 3, 1]
const %q_offset: float32[5, 3, 1]
%1 = qfuse.dequantize(%0, %q_scale, %q_offset, 'uint8[0,15] 1x1x* float32 float32:reciprocal:round-zp float_offset'): float32[5, 3, 8]
%2 = aten.view(%1, (5, 24)): float32[5, 24]
%x: float32[3, 24]
%3 = aten.linear(%x, %2): float32[3, 5]
return (%3)
fired: float-zero-point 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top", [15, 255])
def test_values_are_the_same(form: str, dtype: torch.dtype, top: int) -> None:
    program = program_of(form, dtype=dtype, top=top)
    fired = assert_same_values(program, [torch.randn(3, K).to(dtype)], FloatZero()).fired

    assert fired == {"float-zero-point": 1}
    assert "aten.sub.Tensor" not in calls(program)


@pytest.mark.numeric
def test_values_that_the_graph_unpacks() -> None:
    b = GraphBuilder()
    packed = b.const("p", torch.randint(0, 256, (N, K), dtype=torch.uint8))
    parts = [
        b.call(aten.__rshift__.Scalar, packed, 4),
        b.call(aten.__and__.Scalar, packed, 15),
    ]
    q = b.call(aten._to_copy.default, b.call(aten.cat.default, parts), dtype=torch.float32)
    z, s = b.const("z", torch.rand(2 * N, 1) * 9 + 0.25), b.const("s", scales(2 * N, 1))
    w = b.call(aten.mul.Tensor, b.call(aten.sub.Tensor, q, z), s)
    x = b.arg("x", torch.float32, 3, K)
    program = finish(b, b.call(aten.linear.default, x, w))

    assert assert_same_values(program, [torch.randn(3, K)], FloatZero()).fired
    assert "[0,15]" in str(program.graph)


@pytest.mark.parametrize("form", FORMS)
def test_integers_are_left_to_the_other_rules(form: str) -> None:
    whole = torch.randint(3, 12, (N, K // GROUP)).float()
    assert "float-zero-point" not in golden(program_of(form, zero=whole), FloatZero())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_refuses_zero_points_that_are_not_finite(form: str, odd: float) -> None:
    zero = torch.rand(N, K // GROUP) + 0.25
    zero[0, 0] = odd
    assert refusal(program_of(form, zero=zero), FloatZero())[0] is MissCode.ZERO_POINT


@pytest.mark.parametrize("form", FORMS)
def test_refuses_a_negative_factor(form: str) -> None:
    scale = scales(N, K // GROUP)
    scale[0, 0] = -1
    assert refusal(program_of(form, scale=scale), FloatZero())[0] is MissCode.RANGE


@pytest.mark.parametrize("form", FORMS)
def test_zero_points_of_run_time_are_no_near_miss(form: str) -> None:
    shown: Any = golden(program_of(form, run_time=True), FloatZero())
    assert "qfuse.dequantize" not in shown
