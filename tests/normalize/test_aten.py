"""Whole models in every spelling, through capture and the whole of normalize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.normalize.sources import SEEDS
from tests.normalize.spelled import aten, calls, codes, finish, same_values, scales, truth
from torch import nn
from torch.export import Dim

from qfuse.capture import capture
from qfuse.ir.events import Exactness, RolledBack
from qfuse.ir.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.aten import rules
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.driver import Context
from qfuse.rewrite.site_check import SiteChecker
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run
from qfuse.zoo import recipes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Node

    from qfuse.ir.program import NormalGraph

K, N = 64, 16
DYNAMIC = {0: Dim("batch", min=1, max=16), 1: Dim("length", min=1, max=64)}


class Spelled(nn.Module):
    """A linear whose forward is written out, on stored parameters."""

    w: torch.Tensor
    b: torch.Tensor
    q: torch.Tensor
    q_t: torch.Tensor
    s: torch.Tensor
    s_col: torch.Tensor
    s_group: torch.Tensor
    sums: torch.Tensor

    def __init__(self, write: Callable[[Spelled, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._write = write
        self.register_buffer("w", torch.randn(N, K))
        self.register_buffer("b", torch.randn(N))
        self.register_buffer("q", codes(N, K))
        self.register_buffer("q_t", codes(K, N))
        self.register_buffer("s", scales(N))
        self.register_buffer("s_col", scales(N, 1))
        self.register_buffer("s_group", scales(N, 4))
        self.register_buffer("sums", self.q.sum(1, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._write(self, x)


def normalized(
    model: nn.Module, x: torch.Tensor, *others: torch.Tensor, dynamic: bool = False
) -> NormalGraph:
    """Capture and normalize; check every rewrite on ``x``, and the whole on all inputs."""
    program = capture(model.eval(), (x,), dynamic_shapes=(DYNAMIC,) if dynamic else None)
    source = clone(program)
    context = Context("normalize", checker=SiteChecker(program, [x]))
    normal = normalize(program, context)
    assert not normal.log.of(RolledBack)
    for value in (x, *others):
        new, old = run(normal, [value])[0], run(source, [value])[0]
        verdict = compare(new, old, truth(source, [value])[0], Exactness.ROUNDING, SITE)
        assert verdict.wrong is None, f"{verdict.wrong}\n{to_text(normal.graph)}"
    return normal


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


@pytest.mark.numeric
@pytest.mark.parametrize("spelling", LINEARS)
@pytest.mark.parametrize(("dtype", "dynamic"), [(torch.float32, True), (torch.bfloat16, False)])
def test_every_spelling_of_a_linear_is_one(
    spelling: str, dtype: torch.dtype, dynamic: bool
) -> None:
    model, x = Spelled(LINEARS[spelling]).to(dtype), torch.randn(3, 5, K, dtype=dtype)
    others = [torch.randn(1, 1, K, dtype=dtype)] if dynamic else []

    normal = normalized(model, x, *others, dynamic=dynamic)

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
    model = Spelled(WEIGHT_ONLY[spelling])
    model.b.data = model.b.to(dtype)
    x = torch.randn(3, 5, K, dtype=dtype)
    others = [torch.randn(1, 1, K, dtype=dtype)] if dynamic else []

    normal = normalized(model, x, *others, dynamic=dynamic)

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


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize every row of ``x`` by hand."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def integers(m: Spelled, q: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(q.view(-1, K), m.q.t())


def by_rows(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    return integers(m, q).view(*x.shape[:2], N).float() * scale * m.s + m.b


def by_features_first(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    y = m.s * integers(m, q).to(torch.float32) * scale.view(-1, 1) + m.b
    return y.view(*x.shape[:2], N)


def by_one_factor(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    return integers(m, q).view(*x.shape[:2], N) * (scale * m.s) + m.b


def stored_transposed(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    y = torch._int_mm(q.view(-1, K), m.q_t).view(*x.shape[:2], N)
    return scale * (y.float() * m.s) + m.b


def static(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q = torch.clamp(torch.round(x / 0.05) + 3, -128, 127).to(torch.int8)
    y = integers(m, q) - 3 * m.q.sum(1)
    return (y.float() * 0.05 * m.s + m.b).view(*x.shape[:2], N)


def static_with_known_sums(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q = torch.clamp(torch.round(x * 20.0) + 3, -128, 127).to(torch.int8)
    y = integers(m, q) - m.sums * 3
    return (y.float() * (0.05 * m.s) + m.b).view(*x.shape[:2], N)


def emulated(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    return F.linear(q.float(), m.q.float()) * scale * m.s + m.b


def in_int32(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    return torch.matmul(q.int(), m.q.int().t()).float() * m.s * scale + m.b


INTEGERS = (
    by_rows,
    by_features_first,
    by_one_factor,
    stored_transposed,
    static,
    static_with_known_sums,
    emulated,
    in_int32,
)


@pytest.mark.numeric
@pytest.mark.parametrize("write", INTEGERS)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), None])
def test_every_spelling_of_an_integer_linear_is_one(
    write: Callable[[Spelled, torch.Tensor], torch.Tensor], shape: tuple[int, int] | None
) -> None:
    x = torch.randn(*(shape or (3, 5)), K)

    normal = normalized(
        Spelled(write), x, *[torch.randn(1, 1, K)] * (shape is None), dynamic=shape is None
    )

    names = ("qfuse.quantize", "qfuse.dequantize", "aten.linear")
    found = [c for c in calls(normal) if c not in {"aten.abs", "aten.amax", "aten.div.Tensor"}]
    assert sorted(found) == sorted((*names, names[1]))
    (linear,) = [n for n in normal.graph.nodes if "linear" in str(n.target)]
    assert [len(a.args) for a in linear.args[:2]] == [4, 4]
    assert linear.meta["val"].ndim == 3


@pytest.mark.numeric
@pytest.mark.parametrize("m", [1, 7])
def test_integers_that_are_used_as_they_are_stay_exact(m: int) -> None:
    model = Spelled(lambda s, x: integers(s, x.round().to(torch.int8)) // 3)
    x = torch.randn(1, m, K) * 50
    program = capture(model, (x,))

    normal = normalize(program)

    assert "aten._int_mm" not in calls(normal)
    want = (x.round().to(torch.int8).view(-1, K).long() @ model.q.long().t()) // 3
    assert torch.equal(run(normal, [x])[0].long(), want)


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
const %weight.qdata: int8[16, 64]
%0 = qfuse.choose_qparams(%input, 'ao-asymmetric int8[-128,127] 1x1x* eps=1.1920928955078125e-07 float32 int8'): (float32[s0, s1, 1], int8[s0, s1, 1])
%1 = getitem(%0, 0): float32[s0, s1, 1]
%2 = getitem(%0, 1): int8[s0, s1, 1]
%3 = qfuse.quantize(%input, %1, %2, 'int8[-128,127] 1x1x* bfloat16 float32:reciprocal:round-zp int'): int8[s0, s1, 64]
%4 = qfuse.dequantize(%3, %1, %2, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[s0, s1, 64]
const %weight.scale: float32[16, 1]
%5 = qfuse.dequantize(%weight.qdata, %weight.scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[16, 64]
const %bias_bias: float32[16]
%6 = aten.linear(%4, %5, %bias_bias): float32[s0, s1, 16]
%7 = aten._to_copy(%6, dtype=bfloat16): bfloat16[s0, s1, 16]
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
const %weight.qdata: int8[16, 64]
const %weight.act_quant_scale: float32[1, 1, 1]
%0 = qfuse.quantize(%input, %weight.act_quant_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): int8[s0, s1, 64]
%1 = qfuse.dequantize(%0, %weight.act_quant_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): float32[s0, s1, 64]
const %weight.scale: float32[16, 1]
%2 = qfuse.dequantize(%weight.qdata, %weight.scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[16, 64]
const %bias: float32[16]
%3 = aten.linear(%1, %2, %bias): float32[s0, s1, 16]
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
const %weight.qdata: float8_e4m3fn[16, 64]
const %weight.scale: float32[16, 1]
%0 = qfuse.dequantize(%weight.qdata, %weight.scale, None, 'float8_e4m3fn[-448,448] 1x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[16, 64]
const %bias: bfloat16[16]
%1 = aten.linear(%input, %0, %bias): bfloat16[s0, s1, 16]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(
    "recipe",
    ["w8a16", "w8a8-dynamic", "w8a8-dynamic-tensor", "w8a8-dynamic-asym", "w8a8-static-ao", "fp8"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8), (1, 1)])
def test_nothing_is_left_of_the_recipes(
    recipe: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = torch.randn(*shape, K, dtype=dtype)
    model = recipes.quantize(nn.Linear(K, N).to(dtype), recipe, (x,)).model

    normal = normalized(model, x)

    allowed = {"aten.linear", "aten._to_copy", "<built-in function getitem>"}
    assert [c for c in calls(normal) if c not in allowed and not c.startswith("qfuse.")] == []
    assert calls(normal).count("aten.linear") == 1


@pytest.mark.property
@given(
    order=st.permutations(["row", "feature", "view", "bias"]),
    sides=st.lists(st.booleans(), min_size=4, max_size=4),
    half=st.sampled_from([None, "row", "feature", "view"]),
    rows=st.sampled_from([(2, 3), (1, 1), (1, 4), (4, 1)]),
    seed=SEEDS,
)
def test_chains_in_any_order_agree(
    order: Sequence[str],
    sides: Sequence[bool],
    half: str | None,
    rows: tuple[int, int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    chain = Chain(rows)
    for step, left in zip(order, sides, strict=True):
        chain.add(step, left=left)
        if step == half:
            chain.y = chain.b.call(aten._to_copy.default, chain.y, dtype=torch.bfloat16)
    program = finish(chain.b, chain.y)

    same_values(program, [codes(*rows, K), scales(*rows, 1)], *rules())

    # A bias that comes before a scale is scaled too, which no single linear says.
    if order.index("bias") > max(order.index("row"), order.index("feature")):
        assert calls(program).count("aten.linear") == 1
        assert not {"aten.mul.Tensor", "aten.mm"} & set(calls(program))


class Chain:
    """A product of integers of ``q [*rows, K]``, scaled and shifted step by step."""

    def __init__(self, rows: tuple[int, int]) -> None:
        self.b = b = GraphBuilder()
        self.rows = rows
        q = b.arg("q", torch.int8, *rows, K)
        self.scale = b.arg("scale", torch.float32, *rows, 1)
        self.w = b.const("w", codes(N, K))
        x = b.call(aten.view.default, q, (-1, K))
        y = b.call(aten._int_mm.default, x, b.call(aten.t.default, self.w))
        self.y = b.call(aten._to_copy.default, y, dtype=torch.float32)
        self.flat = True

    def add(self, step: str, *, left: bool) -> None:
        """Add one step; ``left`` is the side of the parameter."""
        b = self.b
        match step:
            case "row":
                self._apply(aten.mul.Tensor, self._per_row(self.scale), left=left)
            case "feature":
                self._apply(aten.mul.Tensor, b.const("s", scales(N)), left=left)
            case "view":
                self.y = b.call(aten.view.default, self.y, (*self.rows, N))
                self.flat = False
            case _:
                self._apply(aten.add.Tensor, b.const("bias", torch.randn(N)), left=left)

    def _per_row(self, param: Node) -> Node:
        return self.b.call(aten.view.default, param, (-1, 1)) if self.flat else param

    def _apply(self, op: Any, param: Node, *, left: bool) -> None:
        operands = (param, self.y) if left else (self.y, param)
        self.y = self.b.call(op, *operands)


def test_the_rules_have_distinct_names() -> None:
    names = [rule.name for rule in rules()]

    assert len(set(names)) == len(names)
