"""Linears and convolutions with weights that stay float8 or float16 in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.lowering import lowered, pairs, the_kernel, why_not

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.dtypes import FLOAT8, FLOATS
from qfuse.ir.events import Exactness
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.lower import Wishes, lower
from qfuse.lower.floats.policy import QUANTIZED
from qfuse.lower.kernels.registry import all_kernels
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_tensor, per_token

aten = torch.ops.aten
pytestmark = [pytest.mark.own_kernels, pytest.mark.numeric]


def weight_of(b: GraphBuilder, *shape: int, **changes: Any) -> Any:
    spec = changes.pop("spec", None) or per_channel(len(shape), **changes)
    scale = torch.rand([int(g) for g in spec.grid(shape)]) * 0.1 + 0.01
    stored = b.const("w", torch.randn(shape).to(spec.dtype))
    return b.call(ops.dequantize, stored, b.const("w_scale", scale), None, str(spec))


def quantized(b: GraphBuilder, x: Any, spec: Any) -> Any:
    shape = [
        1 if block is None else int(s)
        for block, s in zip(spec.block, x.meta["val"].shape, strict=True)
    ]
    scale = b.const("x_scale", torch.rand(shape) * 0.1 + 0.05)
    q = b.call(ops.quantize, x, scale, None, str(spec))
    return b.call(ops.dequantize, q, scale, None, str(spec))


def check(program: NormalGraph, kernel: str) -> None:
    registry, cost = all_kernels(kernels.load()), CostModel(CostProfile.pinned())
    wishes = Wishes(floats=QUANTIZED)
    low = lower(optimize(clone(program)), Target.for_testing(), cost, registry, None, wishes)
    assert the_kernel(low) == kernel
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("float_dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 5, 66])
def test_weight_only_linears(dtype: torch.dtype, float_dtype: torch.dtype, rows: int) -> None:
    b = GraphBuilder()
    x = b.arg("x", float_dtype, rows, 50)
    weight = weight_of(b, 70, 50, dtype=dtype, float_dtype=float_dtype)
    check(b.done(b.call(aten.linear.default, x, weight)), "qfuse.linear_w8a16")


@pytest.mark.parametrize("block", [(None, None), (1, 16), (1, None)])
def test_scales_of_every_granularity(block: tuple[int | None, int | None]) -> None:
    b = GraphBuilder()
    spec = per_channel(2, torch.float8_e4m3fn).with_block(block)
    weight = weight_of(b, 70, 64, spec=spec)
    x = b.arg("x", torch.float32, 5, 64)
    check(b.done(b.call(aten.linear.default, x, weight)), "qfuse.linear_w8a16")


@pytest.mark.parametrize("x_dtype", FLOAT8)
@pytest.mark.parametrize("by_rows", [False, True])
def test_float8_activations_are_dequantized_before(x_dtype: torch.dtype, by_rows: bool) -> None:
    b = GraphBuilder()
    spec = (per_token if by_rows else per_tensor)(2, x_dtype)
    x = quantized(b, b.arg("x", torch.float32, 5, 50), spec)
    weight = weight_of(b, 70, 50, dtype=torch.float8_e4m3fn)
    y = b.call(aten.relu.default, b.call(aten.linear.default, x, weight))
    check(b.done(y), "qfuse.linear_w8a16")


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("static", [False, True])
def test_convolutions(dtype: torch.dtype, groups: int, static: bool) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 16, 9, 7)
    x = quantized(b, x, per_tensor(4, dtype)) if static else x
    weight = weight_of(b, 32, 16 // groups, 3, 3, dtype=dtype)
    settings = [2, 1], [1, 0], [1, 2], groups
    y = b.call(aten.conv2d.default, x, weight, None, *settings)
    check(b.done(y), "qfuse.convolution_w8a16")


def test_a_float8_weight_with_integer_activations_is_read_in_float() -> None:
    b = GraphBuilder()
    x = quantized(b, b.arg("x", torch.float32, 5, 50), per_tensor(2))
    weight = weight_of(b, 70, 50, dtype=torch.float8_e4m3fn)
    low = lowered(b.done(b.call(aten.linear.default, x, weight)))
    assert "float8" in why_not(low, "qfuse.linear_w8a8")
    assert the_kernel(low) == "qfuse.linear_w8a16"


def test_refuses_a_float16_weight_in_bfloat16() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 5, 50)
    weight = weight_of(b, 70, 50, dtype=torch.float16, float_dtype=torch.bfloat16)
    low = lowered(b.done(b.call(aten.linear.default, x, weight)))
    text = "the linear computes in torch.bfloat16"
    assert why_not(low, "qfuse.linear_w16a32") == text
    assert why_not(low, "qfuse.linear_w8a16") == "the weight is stored as torch.float16"
