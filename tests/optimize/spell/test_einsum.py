from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.matmul import Products
from tests.support.values import bits_same

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.matmul import as_fused_matmul
from qfuse.optimize import optimize
from qfuse.optimize.spell.einsum import SpellEinsum
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.quant import per_token
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32 = torch.float32
SIZES: dict[str, int | str] = {"b": 2, "h": 3, "g": 4, "q": "m", "k": 5, "d": 8}


def source(equation: str, *, rows: bool = False) -> NormalGraph:
    """Return an einsum of two quantized tensors."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    x, k = (tuple(SIZES[name] for name in term) for term in terms)
    case = Products(x, k, (per_token(len(x)), per_token(len(k))) if rows else None)
    return case.done(case.b.call(aten.einsum.default, equation, [case.x, case.k]))


def refusal(program: NormalGraph) -> Miss:
    """Return why the rule, which must refuse once, does not fire."""
    result = apply_rules(program, [SpellEinsum()])
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    return miss


def test_golden_heads_behind_tokens() -> None:
    program = source("bqhd,bkhd->bhqk")
    assert apply_rules(program, [SpellEinsum()]).fired == {"spell-einsum": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, s0, 3, 8]
const %x_scale: float32[1, 1, 1, 1]
const %x_zero: int32[1, 1, 1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int'): uint8[2, s0, 3, 8]
%1 = qfuse.dequantize(%0, %x_scale, %x_zero, 'uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, s0, 3, 8]
%k: float32[2, 5, 3, 8]
const %k_scale: float32[1, 1, 1, 1]
const %k_zero: int32[1, 1, 1, 1]
%2 = qfuse.quantize(%k, %k_scale, %k_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): int8[2, 5, 3, 8]
%3 = qfuse.dequantize(%2, %k_scale, %k_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 5, 3, 8]
%4 = aten.permute(%1, (0, 2, 1, 3)): float32[2, 3, s0, 8]
%5 = aten.permute(%3, (0, 2, 3, 1)): float32[2, 3, 8, 5]
%6 = aten.matmul(%4, %5): float32[2, 3, s0, 5]
return (%6)""",
    )


EQUATIONS = (
    "bhqd,bhkd->bhqk",
    "bqhd,bkhd->bhqk",
    "b h q d, b h d k -> b h q k",
    "bhqd,bhdk->bqhk",
    "hqd,hdk->hkq",
    "qd,kd->qk",
    "qd,kd->kq",
    "dqb,dbk->bqk",
    "bhqd,bhkd->hbqk",
    "bhgqd,bhkd->bhgqk",
    "bqhgd,bkhd->bhgqk",
    "bhgqk,bhkd->bhgqd",
    "bhgqk,bkhd->bqhgd",
    "bhqd,hkd->bhqk",
    "bhqd,kd->bhqk",
    "qd,bhkd->bhkq",
    # One operand is a vector for each entry of the batch.
    "bqd,bd->bq",
    "bd,bkd->bk",
    "bd,bdk->bk",
    "bd,bhkd->bhk",
    "bhd,bhkd->hbk",
    "qd,d->q",
)
# Scales of rows of both operands, which are not along the summed axis.
ROWS = (
    *("bhqd,bhkd->bhqk", "bqhd,bkhd->bhqk", "qd,kd->kq", "bhqd,bhkd->hbqk"),
    *("bhgqd,bhkd->bhgqk", "bqhgd,bkhd->bhgqk", "bhgqd,bkhd->bqhgk", "bd,bkd->bk"),
)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("equation", "rows"), [*((e, False) for e in EQUATIONS), *((e, True) for e in ROWS)]
)
def test_products_of_matrices(equation: str, rows: bool) -> None:
    program = source(equation, rows=rows)
    before = clone(program)
    done = optimize(program)
    (fused,) = (view for node in done.graph.nodes if (view := as_fused_matmul(node)))

    assert fused.batch is not None
    inputs = random_inputs(before, m=7)
    (got,), (want,) = run(done, inputs), run(before, inputs)
    assert (got.shape, got.stride()) == (want.shape, want.stride())
    assert bits_same((got,), (want,)) or torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "equation",
    [
        "bhqd,bhkd",
        "bhqd,bhkd->bhq",
        "bhqd,hkd->bqk",
        "bqd,kd->qk",
        "qd,qd->q",
        "qd,qd->qd",
        "q,k->qk",
    ],
)
def test_refuses_other_equations(equation: str) -> None:
    miss = refusal(source(equation))
    assert miss.code is MissCode.PATTERN
    assert miss.reason == f"{equation} is not a product of matrices"


@pytest.mark.parametrize("equation", ["qd,bhkd->bhqk", "bqd,hkd->bhqk"])
def test_refuses_a_result_with_rows_outside_of_the_batch(equation: str) -> None:
    miss = refusal(source(equation))
    assert miss.code is MissCode.SHAPE
    assert miss.reason.endswith("of the result are not those of a product of matrices")


@pytest.mark.numeric
@pytest.mark.parametrize("equation", ["bhgqd,bhkd->bhgqk", "bqhgd,bkhd->bhgqk"])
def test_axes_of_one_element(equation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in ("bhg", "q", "k", "bhgqk"):
        with monkeypatch.context() as patch:
            for name in one:
                patch.setitem(SIZES, name, 1)
            program = source(equation)
        before = clone(program)
        done = optimize(program)
        assert any(as_fused_matmul(node) for node in done.graph.nodes)
        inputs = random_inputs(before, m=7)
        (got,), (want,) = run(done, inputs), run(before, inputs)
        assert (got.shape, got.stride()) == (want.shape, want.stride())
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_refuses_an_axis_that_is_broadcast() -> None:
    case = Products((4, 1), (5, 8))
    program = case.done(case.b.call(aten.einsum.default, "qd,kd->qk", [case.x, case.k]))

    miss = refusal(program)
    assert miss.code is MissCode.SHAPE
    assert miss.reason == "an axis of one element is broadcast: (4, 1), (5, 8)"


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("equation", "k"),
    [
        ("...qd,...kd->...qk", (2, 3, 5, 8)),
        ("...qd,kd->...qk", (5, 8)),
        ("...qd,...kd->...qk", (3, 5, 8)),
        ("b...qd,b...kd->b...qk", (2, 3, 5, 8)),
    ],
)
def test_dots(equation: str, k: tuple[int, ...]) -> None:
    case = Products((2, 3, 4, 8), k)
    program = case.done(case.b.call(aten.einsum.default, equation, [case.x, case.k]))
    before = clone(program)
    done = optimize(program)

    assert any(as_fused_matmul(node) for node in done.graph.nodes)
    inputs = random_inputs(before)
    (got,), (want,) = run(done, inputs), run(before, inputs)
    assert (got.shape, got.stride()) == (want.shape, want.stride())
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equation", ["...qd,...kd->qk", "...qd,...kd"])
def test_refuses_dots_that_are_summed(equation: str) -> None:
    case = Products((2, 4, 8), (2, 5, 8))
    program = case.done(case.b.call(aten.einsum.default, equation, [case.x, case.k]))

    assert refusal(program).code is MissCode.PATTERN


@pytest.mark.numeric
@pytest.mark.parametrize("k", [(2, 8), (8,)])
def test_dots_before_a_vector(k: tuple[int, ...]) -> None:
    case = Products((2, 4, 8), k)
    program = case.done(case.b.call(aten.einsum.default, "...qd,...d->...q", [case.x, case.k]))
    before = clone(program)
    done = optimize(program)

    assert any(as_fused_matmul(node) for node in done.graph.nodes)
    inputs = random_inputs(before)
    (got,), (want,) = run(done, inputs), run(before, inputs)
    assert (got.shape, got.stride()) == (want.shape, want.stride())
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_refuses_a_float_operand() -> None:
    case = Products()
    plain = case.b.arg("plain", F32, 2, 3, 5, 8)
    program = case.done(case.b.call(aten.einsum.default, "bhqd,bhkd->bhqk", [case.x, plain]))

    miss = refusal(program)
    assert (miss.code, miss.at.name) == (MissCode.NOT_QUANTIZED, "plain")
    assert miss.reason == "the right operand is torch.float32, the other one is quantized"


def test_float_operands_are_not_reported() -> None:
    case = Products()
    plain = case.b.arg("plain", F32, 2, 3, 5, 8)
    program = case.done(case.b.call(aten.einsum.default, "bhqd,bhkd->bhqk", [plain, plain]))
    result = apply_rules(program, [SpellEinsum()])

    assert (result.modified, list(result.misses)) == (False, [])
