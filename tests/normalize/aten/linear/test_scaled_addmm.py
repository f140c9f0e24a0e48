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
    codes,
    finish,
    golden,
    refusal,
    scales,
)
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.linear.scaled_addmm import FoldAddmmFactors
from qfuse.normalize.aten.qdq.dequantize import DequantizeChain
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder

K, N = 12, 5


def weight(b: GraphBuilder, dtype: torch.dtype, kind: str = "dequantized") -> Node:
    """Add a weight ``[K, N]``."""
    if kind == "float":
        return b.const("w", torch.randn(K, N).to(dtype))
    real = b.call(aten._to_copy.default, b.const("w", codes(N, K)), dtype=dtype)
    if kind == "dequantized":
        real = b.call(aten.mul.Tensor, real, b.const("s", scales(N, 1).to(dtype)))
    return b.call(aten.t.default, real)


def addmm(
    kind: str = "dequantized",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (N,),
    **factors: Any,
) -> CapturedGraph:
    b = GraphBuilder()
    x, bias = b.arg("x", dtype, 3, K), b.const("bias", torch.randn(shape).to(dtype))
    return finish(b, b.call(aten.addmm.default, bias, x, weight(b, dtype, kind), **factors))


def test_golden_alpha_in_the_scale_and_beta_in_the_bias() -> None:
    program = addmm(alpha=0.3, beta=2)
    assert_expected_inline(
        golden(program, DequantizeChain(), FoldAddmmFactors()),
        """\
%x: float32[3, 12]
const %w: int8[5, 12]
const %s_alpha: float32[5, 1]
%0 = qfuse.dequantize(%w, %s_alpha, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 12]
const %bias_beta: float32[5]
%1 = aten.linear(%x, %0, %bias_beta): float32[3, 5]
return (%1)
fired: dequantize-chain 1, fold-addmm-factors 1""",
    )


def test_golden_a_residual_is_added_behind() -> None:
    program = addmm(shape=(3, N), alpha=-0.3, beta=2)
    assert_expected_inline(
        golden(program, DequantizeChain(), FoldAddmmFactors()),
        """\
%x: float32[3, 12]
const %bias: float32[3, 5]
const %w: int8[5, 12]
const %s_alpha: float32[5, 1]
%0 = qfuse.dequantize(%w, %s_alpha, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 12]
%1 = aten.linear(%x, %0): float32[3, 5]
%2 = aten.add.Tensor(%1, %bias, alpha=2): float32[3, 5]
return (%2)
fired: dequantize-chain 1, fold-addmm-factors 1""",
    )


@pytest.mark.parametrize(
    ("factors", "code"),
    [
        ({"alpha": 0}, MissCode.ARGUMENT),
        ({"alpha": math.inf}, MissCode.ARGUMENT),
        ({"beta": math.nan}, MissCode.ARGUMENT),
        ({}, MissCode.PATTERN),
    ],
)
def test_refuses_other_factors(factors: dict[str, Any], code: MissCode) -> None:
    assert refusal(addmm("cast", **factors), FoldAddmmFactors()) == (code, "addmm_default")


def test_refuses_a_float_weight() -> None:
    program = addmm("float", alpha=3)
    assert refusal(program, FoldAddmmFactors()) == (MissCode.NOT_QUANTIZED, "w")


def test_refuses_a_scale_that_overflows() -> None:
    b = GraphBuilder()
    x, bias = b.arg("x", torch.float32, 3, K), b.const("bias", torch.randn(N))
    program = finish(b, b.call(aten.addmm.default, bias, x, weight(b, torch.float32), alpha=1e39))
    golden(program, DequantizeChain())
    assert refusal(program, FoldAddmmFactors())[0] is MissCode.RANGE


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["dequantized", "cast"])
@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 1), (-1.7, 0.9), (1, -3), (2, 0), (0.1, 0.1)])
@pytest.mark.parametrize("shape", [(N,), (1, N), (3, N), (3, 1), (1,), ()])
def test_addmm_agrees(
    dtype: torch.dtype, kind: str, alpha: float, beta: float, shape: tuple[int, ...]
) -> None:
    program = addmm(kind, dtype, shape, alpha=alpha, beta=beta)
    x = (torch.randn(3, K) * 0.1).to(dtype)
    fired = assert_same_values(program, [x], DequantizeChain(), FoldAddmmFactors()).fired

    assert fired["fold-addmm-factors"] == 1
    assert "aten.addmm" not in calls(program)
    # A weight without a scale is multiplied behind the linear.
    assert ("aten.mul.Tensor" in calls(program)) == (kind == "cast" and alpha != 1)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", ["dequantized", "cast"])
@pytest.mark.parametrize("shape", [(3, N), (3, 1), (1,), ()])
def test_a_summand_that_is_no_bias_is_added_behind(kind: str, shape: tuple[int, ...]) -> None:
    program = addmm(kind, shape=shape)
    fired = assert_same_values(
        program, [torch.randn(3, K) * 0.1], DequantizeChain(), FoldAddmmFactors()
    ).fired

    assert fired["fold-addmm-factors"] == 1
    assert {"aten.linear", "aten.add.Tensor"} <= set(calls(program))


@pytest.mark.numeric
def test_a_summand_of_nan_is_ignored_with_the_factor_0() -> None:
    b = GraphBuilder()
    x, bias = b.arg("x", torch.float32, 3, K), b.const("bias", torch.full((N,), math.nan))
    program = finish(b, b.call(aten.addmm.default, bias, x, weight(b, torch.float32), beta=0))
    fired = assert_same_values(
        program, [torch.randn(3, K)], DequantizeChain(), FoldAddmmFactors()
    ).fired
    assert fired["fold-addmm-factors"] == 1


@pytest.mark.numeric
@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 2), (1, 1), (-1.5, 0)])
@pytest.mark.parametrize("shape", [(N,), (1,)])
def test_addmv_agrees(alpha: float, beta: float, shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    matrix = b.call(aten.t.default, weight(b, torch.float32))
    vec, bias = b.arg("x", torch.float32, K), b.const("bias", torch.randn(shape))
    y = b.call(aten.addmv.default, bias, matrix, vec, alpha=alpha, beta=beta)
    program = finish(b, y)
    fired = assert_same_values(
        program, [torch.randn(K)], DequantizeChain(), FoldAddmmFactors()
    ).fired
    assert fired["fold-addmm-factors"] == 1


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(N,), (1, 1, N), (2, 3, N), (2, 1, N)])
def test_baddbmm_agrees(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    w = b.call(
        aten.expand.default, b.call(aten.unsqueeze.default, weight(b, torch.float32), 0), (2, K, N)
    )
    x, bias = b.arg("x", torch.float32, 2, 3, K), b.const("bias", torch.randn(shape))
    program = finish(b, b.call(aten.baddbmm.default, bias, x, w, alpha=0.3, beta=-2.0))
    fired = assert_same_values(
        program, [torch.randn(2, 3, K)], DequantizeChain(), FoldAddmmFactors()
    ).fired
    assert fired["fold-addmm-factors"] == 1


class _Divided(nn.Module):
    """A product with factors, whose weight is quantized by a division."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(-127, 128, (48, 64), dtype=torch.int8))
        self.register_buffer("steps", torch.rand(48, 1) * 100 + 50)
        self.register_buffer("bias", torch.randn(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, steps, bias = (b.to(x.dtype) for b in self.buffers())
        return torch.addmm(bias, x, (w / steps).t(), alpha=-0.3, beta=2)


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_dequantized_later_is_folded(dtype: torch.dtype) -> None:
    model, x = _Divided().eval(), torch.randn(24, 64, dtype=dtype)
    target = Target.for_testing(isa="avx512_vnni")
    fast = qfuse.compile(model, (x,), options={"backend": "eager"}, check="site", target=target)

    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w8a16"]
    assert fast.report.rolled_back == ()
    loose = dtype is torch.bfloat16
    tolerance: dict[str, Any] = (
        {"rtol": 3e-2, "atol": 3e-2} if loose else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(fast(x), model(x), **tolerance)


class _Siblings(nn.Module):
    """Two products of one input, the second with factors."""

    def __init__(self) -> None:
        super().__init__()
        for name in "ab":
            self.register_buffer(name, torch.randint(-127, 128, (64, 48), dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.rand(48) * 0.01 + 0.001)
            self.register_buffer(f"{name}_bias", torch.randn(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = (
            self.get_buffer(n).to(x.dtype) * self.get_buffer(f"{n}_scale").to(x.dtype) for n in "ab"
        )
        first = torch.addmm(self.get_buffer("a_bias").to(x.dtype), x, a)
        bias = self.get_buffer("b_bias").to(x.dtype)
        return first.softmax(-1) @ torch.addmm(bias, x, b, alpha=0.3, beta=-2).t()


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_siblings_merge(dtype: torch.dtype) -> None:
    model, x = _Siblings().eval(), torch.randn(24, 64, dtype=dtype)
    target = Target.for_testing(isa="avx512_vnni")
    fast = qfuse.compile(model, (x,), options={"backend": "eager"}, check="site", target=target)

    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w8a16"]
    assert fast.report.fired["merge-linears"] == 1
    assert fast.report.rolled_back == ()
    loose = dtype is torch.bfloat16
    tolerance: dict[str, Any] = (
        {"rtol": 3e-2, "atol": 3e-2} if loose else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(fast(x), model(x), **tolerance)
