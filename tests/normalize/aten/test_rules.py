"""Float and weight-only linears in every spelling, through capture and all of normalize."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import calls
from tests.support.sources.models import (
    DYNAMIC,
    K,
    N,
    Spelled,
    captured_each,
    normalized,
    normalized_graph,
)
from torch import nn

from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.graph.text import to_text
from qfuse.normalize.aten.rules import rules
from qfuse.zoo import recipes

LINEARS: dict[str, Callable[[Spelled, torch.Tensor], torch.Tensor]] = {
    "linear": lambda m, x: F.linear(x, m.w, m.b),
    "matmul": lambda m, x: x @ m.w.t() + m.b,
    "mT": lambda m, x: torch.add(m.b, torch.matmul(x, m.w.mT)),
    "einsum": lambda m, x: torch.einsum("bsk,nk->bsn", x, m.w) + m.b,
    "tensordot": lambda m, x: torch.tensordot(x, m.w, dims=([2], [1])) + m.b,
    "inner": lambda m, x: torch.inner(x, m.w) + m.b,
    "mm": lambda m, x: torch.mm(x.reshape(-1, K), m.w.t()).reshape(*x.shape[:2], N) + m.b,
    "addmm": lambda m, x: torch.addmm(m.b, x.view(-1, K), m.w.T).view(*x.shape[:2], N),
    "copied": lambda m, x: (x.reshape(-1, K) @ m.w.t().contiguous() + m.b).view(*x.shape[:2], N),
    "transposed": lambda m, x: (x.transpose(0, 1) @ m.w.t() + m.b).transpose(0, 1),
}


@cache
def captured(kind: str, dtype: torch.dtype, dynamic: bool) -> dict[str, CapturedGraph]:
    """The graphs of a table of spellings in one dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        spellings = {"linear": LINEARS, "weight-only": WEIGHT_ONLY}[kind]
        models = {name: Spelled(write).eval() for name, write in spellings.items()}
        for model in models.values():
            # Quantized values and scales have dtypes of their own.
            model.b.data, model.w.data = model.b.to(dtype), model.w.to(dtype)
        x = torch.randn(3, 5, K, dtype=dtype)
        return captured_each(models, x, (DYNAMIC,) if dynamic else None)


def inputs(dtype: torch.dtype, dynamic: bool) -> list[torch.Tensor]:
    """Inputs of a spelling, of several sizes if they may vary."""
    shapes = [(3, 5, K), (1, 1, K)] if dynamic else [(3, 5, K)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.numeric
@pytest.mark.parametrize("spelling", LINEARS)
@pytest.mark.parametrize(("dtype", "dynamic"), [(torch.float32, True), (torch.bfloat16, False)])
def test_every_spelling_of_a_linear_is_one(
    spelling: str, dtype: torch.dtype, dynamic: bool
) -> None:
    source = captured("linear", dtype, dynamic)[spelling]

    normal = normalized_graph(source, *inputs(dtype, dynamic))

    left = [c for c in calls(normal) if not c.startswith(("aten.sym_size", "aten.transpose"))]
    assert left == ["aten.linear"]
    (linear,) = [n for n in normal.graph.nodes if "linear" in str(n.target)]
    assert linear.meta["val"].ndim == 3
    assert len(linear.args) == 3


WEIGHT_ONLY: dict[str, Callable[[Spelled, torch.Tensor], torch.Tensor]] = {
    "after": lambda m, x: F.linear(x, m.q.to(x.dtype)) * m.s.to(x.dtype),
    "before bias": lambda m, x: m.s.to(x.dtype) * F.linear(x, m.q.to(x.dtype)) + m.b,
    "after bias": lambda m, x: F.linear(x, m.q.to(x.dtype), m.b) * m.s.to(x.dtype),
    "number": lambda m, x: 0.0123 * F.linear(x, m.q.to(x.dtype), m.b),
    "scalar": lambda m, x: F.linear(x, m.q.to(x.dtype)) * m.s[0],
    "float32": lambda m, x: (F.linear(x, m.q.to(x.dtype)).float() * m.s + m.b).to(x.dtype),
    "flat": lambda m, x: (x.view(-1, K) @ m.q.t().to(x.dtype) * m.s).view(*x.shape[:2], N),
    "shifted": lambda m, x: F.linear(x, m.q.to(x.dtype) - 7) * m.s.to(x.dtype),
    "inside": lambda m, x: F.linear(x, m.q.to(x.dtype) * m.s_col.to(x.dtype), m.b),
    "inside shifted": lambda m, x: F.linear(x, (m.q.to(x.dtype) - 7) * m.s_col.to(x.dtype)),
    "inside transposed": lambda m, x: x @ (m.q_t.to(x.dtype) * m.s.to(x.dtype)),
    "inside and moved": lambda m, x: F.linear(x, (m.q_t.to(x.dtype) * m.s.to(x.dtype)).t(), m.b),
    "groups": lambda m, x: F.linear(
        x, (m.q.to(x.dtype).view(N, 4, -1) * m.s_group[:, :, None].to(x.dtype)).view(N, K), m.b
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize("spelling", WEIGHT_ONLY)
@pytest.mark.parametrize(
    ("dtype", "dynamic"), [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)]
)
def test_every_spelling_of_a_weight_only_linear_is_one(
    spelling: str, dtype: torch.dtype, dynamic: bool
) -> None:
    source = captured("weight-only", dtype, dynamic)[spelling]

    normal = normalized_graph(source, *inputs(dtype, dynamic))

    found = [c for c in calls(normal) if not c.startswith("aten.sym_size")]
    if dtype is torch.float16 and spelling in {"flat", "float32"}:
        # The scale is not in float16 there, so the unscaled sums are as well.
        assert "qfuse.dequantize" in found
        return
    casts = spelling in {"float32", "flat"} and dtype is not torch.float32
    bias = casts and spelling == "float32"
    want = ["qfuse.dequantize", "aten.linear"] + ["aten._to_copy"] * casts
    want += ["aten.add.Tensor", "aten._to_copy"] * bias
    assert found == want
    (dequantize,) = [n for n in normal.graph.nodes if "dequantize" in str(n.target)]
    assert all(n.op == "get_attr" for n in dequantize.all_input_nodes)


class Two(nn.Module):
    """Two linears of the same layer, and a third one that shares the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, 2 * K), nn.Linear(2 * K, K)
        self.out = nn.Linear(K, 2 * K, bias=False)
        self.out.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.down(self.up(x).relu()))
        return y


def test_golden_torchao_weight_only_with_a_tied_weight() -> None:
    model = recipes.quantize(Two().bfloat16(), "w8a16").model
    x = torch.randn(2, 8, K, dtype=torch.bfloat16)
    normal = normalized(model, x, dynamic=True)

    assert_expected_inline(
        to_text(normal.graph),
        """\
%x: bfloat16[s0, s1, 64]
const %down.weight.qdata: int8[64, 128]
const %out.weight.qdata: int8[128, 64]
const %out_weight_scale_scale: bfloat16[128, 1]
%0 = qfuse.dequantize(%out.weight.qdata, %out_weight_scale_scale, None, 'int8[-128,127] 1x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[128, 64]
const %up.bias: bfloat16[128]
%1 = aten.linear(%x, %0, %up.bias): bfloat16[s0, s1, 128]
%2 = aten.relu(%1): bfloat16[s0, s1, 128]
const %down_weight_scale_scale: bfloat16[64, 1]
%3 = qfuse.dequantize(%down.weight.qdata, %down_weight_scale_scale, None, 'int8[-128,127] 1x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[64, 128]
const %down.bias: bfloat16[64]
%4 = aten.linear(%2, %3, %down.bias): bfloat16[s0, s1, 64]
const %out_weight_scale_scale: bfloat16[128, 1]
%5 = qfuse.dequantize(%out.weight.qdata, %out_weight_scale_scale, None, 'int8[-128,127] 1x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[128, 64]
%6 = aten.linear(%4, %5): bfloat16[s0, s1, 128]
return (%6)""",
    )


def test_golden_torchao_dynamic_asymmetric() -> None:
    model = recipes.quantize(nn.Linear(K, N).bfloat16(), "w8a8-dynamic-asym").model
    x = torch.randn(2, 8, K, dtype=torch.bfloat16)
    normal = normalized(model, x, dynamic=True)

    assert_expected_inline(
        to_text(normal.graph),
        """\
%input: bfloat16[s0, s1, 64]
const %weight.qdata: int8[48, 64]
%0 = qfuse.choose_qparams(%input, 'ao-asymmetric int8[-128,127] 1x1x* eps=1.1920928955078125e-07 float32 int8'): (float32[s0, s1, 1], int8[s0, s1, 1])
%1 = getitem(%0, 0): float32[s0, s1, 1]
%2 = getitem(%0, 1): int8[s0, s1, 1]
%3 = qfuse.quantize(%input, %1, %2, 'int8[-128,127] 1x1x* bfloat16 float32:reciprocal:round-zp int'): int8[s0, s1, 64]
%4 = qfuse.dequantize(%3, %1, %2, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[s0, s1, 64]
const %weight.scale: float32[48, 1]
%5 = qfuse.dequantize(%weight.qdata, %weight.scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[48, 64]
const %bias_bias: float32[48]
%6 = aten.linear(%4, %5, %bias_bias): float32[s0, s1, 48]
%7 = aten._to_copy(%6, dtype=bfloat16): bfloat16[s0, s1, 48]
return (%7)""",
    )


def test_golden_torchao_static() -> None:
    x = torch.randn(2, 8, K)
    model = recipes.quantize(nn.Linear(K, N), "w8a8-static-ao", (x,)).model
    normal = normalized(model, x, dynamic=True)

    assert_expected_inline(
        to_text(normal.graph),
        """\
%input: float32[s0, s1, 64]
const %weight.qdata: int8[48, 64]
const %weight.act_quant_scale: float32[1, 1, 1]
%0 = qfuse.quantize(%input, %weight.act_quant_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): int8[s0, s1, 64]
%1 = qfuse.dequantize(%0, %weight.act_quant_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): float32[s0, s1, 64]
const %weight.scale: float32[48, 1]
%2 = qfuse.dequantize(%weight.qdata, %weight.scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[48, 64]
const %bias: float32[48]
%3 = aten.linear(%1, %2, %bias): float32[s0, s1, 48]
return (%3)""",
    )


def test_golden_torchao_float8() -> None:
    x = torch.randn(2, 8, K, dtype=torch.bfloat16)
    model = recipes.quantize(nn.Linear(K, N).bfloat16(), "fp8", (x,)).model
    normal = normalized(model, x, dynamic=True)

    assert_expected_inline(
        to_text(normal.graph),
        """\
%input: bfloat16[s0, s1, 64]
const %weight.qdata: float8_e4m3fn[48, 64]
const %weight.scale: float32[48, 1]
%0 = qfuse.dequantize(%weight.qdata, %weight.scale, None, 'float8_e4m3fn[-448,448] 1x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[48, 64]
const %bias: bfloat16[48]
%1 = aten.linear(%input, %0, %bias): bfloat16[s0, s1, 48]
return (%1)""",
    )


RECIPES = (
    *("w8a16", "w8a8-dynamic", "w8a8-dynamic-tensor", "w8a8-dynamic-asym", "w8a8-static-ao"),
    "fp8",
)


@cache
def quantized(dtype: torch.dtype, shape: tuple[int, int]) -> dict[str, CapturedGraph]:
    """The graphs of a linear in all recipes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(*shape, K, dtype=dtype)
        linears = {name: nn.Linear(K, N).to(dtype) for name in RECIPES}
        models = {name: recipes.quantize(linears[name], name, (x,)).model for name in RECIPES}
        return captured_each(models, x)


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8), (1, 1)])
def test_nothing_is_left_of_the_recipes(
    recipe: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    normal = normalized_graph(quantized(dtype, shape)[recipe], torch.randn(*shape, K, dtype=dtype))

    allowed = {"aten.linear", "aten._to_copy", "<built-in function getitem>"}
    assert [c for c in calls(normal) if c not in allowed and not c.startswith("qfuse.")] == []
    assert calls(normal).count("aten.linear") == 1


def test_the_rules_have_distinct_names() -> None:
    names = [rule.name for rule in rules()]

    assert len(set(names)) == len(names)
