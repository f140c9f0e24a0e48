from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.zoo_models import compiled
from tests.support.values import bits_same
from torch import nn

import qfuse
from qfuse.ir.events import Fired, MissCode
from qfuse.ir.graph.stage_graph import MUTABLE_META, NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.fold.constants import FoldConstants
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


def fold(program: NormalGraph) -> PassResult:
    """Fold; values must stay the same bits."""
    source = clone(program)
    result = FoldConstants().run(program, RewriteContext("optimize"))
    inputs = random_inputs(program)
    assert bits_same(run(program, inputs), run(source, inputs))
    return result


def refusal(program: NormalGraph) -> list[tuple[MissCode, str]]:
    """Fold nothing; return the misses."""
    before = to_text(program.graph)
    result = fold(program)
    assert not result.fired
    assert to_text(program.graph) == before
    return [(miss.code, miss.at.name) for _, miss in result.misses]


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).mul(20).to(dtype)


def test_golden_casts_of_weight_and_bias() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 3, 8)
    w = b.call(aten._to_copy.default, b.const("w", weight(4, 8)), dtype=torch.bfloat16)
    bias = b.call(aten._to_copy.default, b.const("b", weight(4)), dtype=torch.bfloat16)
    program = b.done(b.call(aten.linear.default, x, w, bias))

    assert fold(program).fired == {"fold-constants": 2}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: bfloat16[3, 8]
const %w_folded: bfloat16[4, 8]
const %b_folded: bfloat16[4]
%0 = aten.linear(%x, %w_folded, %b_folded): bfloat16[3, 4]
return (%0)""",
    )


def test_golden_slices_of_one_constant_have_their_own_memory() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 3, 8), b.const("w", weight(6, 8))
    parts = [b.call(aten.slice.Tensor, w, 0, start, start + 2) for start in (0, 2)]
    program = b.done(*[b.call(aten.linear.default, x, part) for part in parts])

    assert fold(program).fired == {"fold-constants": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[3, 8]
const %w_folded: float32[2, 8]
const %w_folded_1: float32[2, 8]
%0 = aten.linear(%x, %w_folded): float32[3, 2]
%1 = aten.linear(%x, %w_folded_1): float32[3, 2]
return (%0, %1)""",
    )
    for name in ("w_folded", "w_folded_1"):
        assert program.module.get_buffer(name).untyped_storage().nbytes() == 2 * 8 * 4


def test_a_transposed_weight_keeps_its_memory() -> None:
    b = GraphBuilder()
    w = b.const("w", weight(8, 4))
    program = b.done(
        b.call(aten.linear.default, b.arg("x", torch.float32, 3, 8), b.call(aten.t.default, w))
    )
    held = program.module.get_buffer("w").data_ptr()

    assert fold(program).fired == {"fold-constants": 1}
    assert program.module.get_buffer("w_folded").data_ptr() == held


def test_two_narrow_types_fit_and_float32_beside_them_does_not() -> None:
    for dtype, fits in ((torch.float16, True), (torch.float64, False)):
        b = GraphBuilder()
        x, w = b.arg("x", torch.float32, 3, 16), b.const("w", weight(16, 16))
        outs = []
        for to in (torch.bfloat16, dtype):
            left = b.call(aten._to_copy.default, x, dtype=to)
            right = b.call(aten._to_copy.default, w, dtype=to)
            outs.append(b.call(aten.linear.default, left, right))
        program = b.done(*outs)
        if fits:
            assert fold(program).fired == {"fold-constants": 1}
        else:
            assert refusal(program) == [(MissCode.SHAPE, "_to_copy_default_1")]


def test_refuses_int8_values_as_floats() -> None:
    b = GraphBuilder()
    w = b.call(
        aten._to_copy.default, b.const("w", weight(32, 64, dtype=torch.int8)), dtype=torch.bfloat16
    )
    y = b.call(aten.linear.default, b.arg("x", torch.bfloat16, 3, 64), w)
    assert refusal(b.done(y)) == [(MissCode.SHAPE, "_to_copy_default")]


def test_refuses_a_weight_that_an_embedding_reads_as_it_is() -> None:
    b = GraphBuilder()
    w = b.const("w", weight(32, 64))
    rows = b.call(aten.embedding.default, w, b.arg("ids", torch.int64, 3))
    x = b.call(aten._to_copy.default, rows, dtype=torch.bfloat16)
    y = b.call(aten.linear.default, x, b.call(aten._to_copy.default, w, dtype=torch.bfloat16))
    result = FoldConstants().run(b.done(y), RewriteContext("optimize"))
    assert [(miss.code, miss.at.name) for _, miss in result.misses] == [
        (MissCode.SHARED, "_to_copy_default_1")
    ]


def test_a_constant_that_another_fold_would_keep_is_not_folded() -> None:
    """`v` stays in memory for the sum, which is not folded since `w` has another user."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 32)
    w, v = b.const("w", weight(64, 32)), b.const("v", weight(32))
    both = b.call(aten.linear.default, x, b.call(aten.add.Tensor, w, v))
    program = b.done(
        both,
        b.call(aten.linear.default, x, w),
        b.call(aten.mul.Tensor, x, b.call(aten.neg.default, v)),
    )
    assert [code for code, _ in refusal(program)] == [MissCode.SHARED]


@pytest.mark.parametrize("kind", ["written", "alias of written", "random", "empty", "returned"])
def test_refuses_what_is_not_a_constant(kind: str) -> None:
    b = GraphBuilder()
    value = weight(8)
    w = b.const("w", value[:4] if kind == "alias of written" else value)
    outs = []
    if kind == "written":
        w.meta[MUTABLE_META] = True
    if kind == "alias of written":
        whole = b.const("whole", value)
        whole.meta[MUTABLE_META] = True
        outs.append(whole)
    op = {"random": aten.rand_like.default, "empty": aten.empty_like.default}
    made = b.call(op.get(kind, aten.neg.default), w)
    if kind != "returned":
        made = b.call(aten.mul.Tensor, b.arg("x", torch.float32, 3, 1), made)
    program = b.done(made, *outs)
    before = to_text(program.graph)

    result = FoldConstants().run(program, RewriteContext("optimize"))
    assert not result.fired
    assert to_text(program.graph) == before


def test_refuses_an_expanded_constant_and_one_of_dynamic_size() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, "n", 8), b.const("w", weight(8))
    wide = b.call(aten.expand.default, w, [4, 8])
    size = b.call(aten.sym_size.int, x, 0)
    rows = b.call(aten.expand.default, w, [size, 8])
    program = b.done(
        b.call(aten.mul.Tensor, b.arg("y", torch.float32, 4, 8), wide),
        b.call(aten.mul.Tensor, x, rows),
    )
    assert not FoldConstants().run(program, RewriteContext("optimize")).fired


def test_a_dequantize_of_constants_stays() -> None:
    b = GraphBuilder()
    q = b.const("q", weight(4, 8, dtype=torch.int32))
    scale = b.const("scale", torch.ones(1, 1))
    spec = QuantSpec(torch.int32, -(2**31), 2**31 - 1, (None, None), torch.float32)
    real = b.call(ops.dequantize, q, scale, None, str(spec))
    program = b.done(b.call(aten.linear.default, b.arg("x", torch.float32, 3, 8), real))
    assert refusal(program) == []


def test_shared_values_without_data() -> None:
    """On the meta device the fold is a constant without data, too."""
    b = GraphBuilder()
    w = b.const("w", torch.empty(4, 8, device="meta"))
    x = b.call(aten.empty.memory_format, [3, 8], dtype=torch.bfloat16, device="meta")
    narrow = b.call(aten._to_copy.default, w, dtype=torch.bfloat16)
    program = b.done(b.call(aten.linear.default, x, narrow))
    assert FoldConstants().run(program, RewriteContext("optimize")).fired
    assert program.module.get_buffer("w_folded").is_meta


class _Autocast(nn.Module):
    """Three linears on one input under autocast, the last with a tied weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.table = nn.Embedding(64, 64)
        if tied:
            self.v.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        with torch.autocast("cpu", torch.bfloat16):
            result: torch.Tensor = self.q(x) * self.k(x) + self.v(x)
        return result


@pytest.mark.numeric
@pytest.mark.parametrize("tied", [False, True])
def test_siblings_merge_under_autocast(tied: bool) -> None:
    model = _Autocast(tied=tied).eval()
    ids = torch.randint(64, (8,))
    fast = qfuse.compile(
        model,
        (ids,),
        options={"backend": "eager"},
        check="site",
        target=Target.for_testing(),
    )
    report = fast.report
    (merge,) = [e for e in report.events if isinstance(e, Fired) and e.rule == "merge-linears"]
    assert merge.note == ("64 + 64" if tied else "64 + 64 + 64")
    # Stored weights are never larger than in the source.
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(t.numel() * t.element_size() for t in fast.plan.lowered.module.buffers()) <= held
    torch.testing.assert_close(fast(ids), model(ids))
    reasons = {miss.reason for miss in report.closest_misses}
    assert not [reason for reason in reasons if "at run time" in reason]


@pytest.mark.numeric
@pytest.mark.zoo
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_projections_of_a_quantized_model_merge_under_autocast(name: str) -> None:
    _, _, fast = compiled(name, "w8a8-static-bf16", 1)
    assert fast.report.fired["merge-linears"] == 1
    assert all(check.passed for check in fast.report.checks)
    assert fast.report.rolled_back == ()


def test_a_value_gets_the_strides_that_were_traced() -> None:
    model = nn.Module()
    model.register_buffer("w", torch.randn(6, 8))

    def forward(x: torch.Tensor) -> torch.Tensor:
        w: torch.Tensor = model.w
        return x @ w.t().contiguous().bfloat16().float()

    model.forward = forward  # type: ignore[method-assign]
    fast = qfuse.compile(model, (torch.randn(3, 8),), options={"backend": "eager"}, check="site")
    assert fast.report.rolled_back == ()
    x = torch.randn(3, 8)
    assert torch.equal(fast(x), model(x))
