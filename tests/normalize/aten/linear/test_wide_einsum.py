from __future__ import annotations

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
    whole,
)

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.linear.wide_einsum import SpellWideEinsum
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

SIZES: dict[str, int | str] = {"b": "b", "t": "t", "s": 3, "h": 2, "d": 4, "e": 3, "n": 5, "k": 6}
EQUATIONS = (
    "btk,hdk->bthd",
    "btk,khd->bthd",
    "btk,hkd->btdh",
    "hdk,btk->bthd",
    "bthd,hdn->btn",
    "bthd,ndh->btn",
    "tk,enk->ten",
    "tk,ekn->etn",
    "...k,enk->...en",
    "thd,hdnk->tkn",
    "bhtd,hdn->btn",
    "bhtd,dhn->btn",
    "hbtd,hdn->btn",
    "bkt,kn->btn",
    "tks,ekn->tsen",
)


def source(equation: str) -> CapturedGraph:
    """Return an einsum of an activation, which has the letter ``t``, and a weight."""
    b = GraphBuilder()
    operands = []
    for term in equation.split("->", maxsplit=1)[0].split(","):
        shape = [SIZES[name] for name in term.replace("...", "bt")]
        if "t" in term or "..." in term:
            operands.append(b.arg("x", torch.float32, *shape))
        else:
            operands.append(b.const("w", whole(*(int(size) for size in shape))))
    return finish(b, b.call(aten.einsum.default, equation, operands))


def test_golden_heads_of_a_projection() -> None:
    assert_expected_inline(
        golden(source("btk,khd->bthd"), SpellWideEinsum()),
        """\
%x: float32[s0, s1, 6]
const %w: float32[6, 2, 4]
%0 = aten.permute(%w, (1, 2, 0)): float32[2, 4, 6]
%1 = aten.reshape(%0, (8, 6)): float32[8, 6]
%2 = aten.sym_size.int(%x, 0): SymInt
%3 = aten.sym_size.int(%x, 1): SymInt
%4 = aten.linear(%x, %1): float32[s0, s1, 8]
%5 = aten.view(%4, (%2, %3, 2, 4)): float32[s0, s1, 2, 4]
return (%5)
fired: spell-wide-einsum 1""",
    )


def test_golden_experts_before_tokens() -> None:
    assert_expected_inline(
        golden(source("tk,enk->etn"), SpellWideEinsum()),
        """\
%x: float32[s0, 6]
const %w: float32[3, 5, 6]
%0 = aten.reshape(%w, (15, 6)): float32[15, 6]
%1 = aten.sym_size.int(%x, 0): SymInt
%2 = aten.linear(%x, %0): float32[s0, 15]
%3 = aten.view(%2, (%1, 3, 5)): float32[s0, 3, 5]
%4 = aten.permute(%3, (1, 0, 2)): float32[3, s0, 5]
return (%4)
fired: spell-wide-einsum 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("equation", EQUATIONS)
def test_same_values_and_strides(equation: str) -> None:
    program = source(equation)
    inputs = random_inputs(program, b=2, t=7)
    (want,) = run(clone(program), inputs)
    result = assert_same_values(program, inputs, SpellWideEinsum())
    assert result.fired == {"spell-wide-einsum": 1}
    (got,) = run(program, inputs)
    assert (got.shape, got.stride()) == (want.shape, want.stride())


@pytest.mark.parametrize("equation", ["tbk,ekn->tn", "tek,enk->ten", "tk,enk->te"])
def test_refuses_other_equations(equation: str) -> None:
    assert refusal(source(equation), SpellWideEinsum())[0] is MissCode.PATTERN


def test_a_matrix_is_left_to_other_rules() -> None:
    program = source("btk,nk->btn")
    assert not apply_rules(program, [SpellWideEinsum()]).modified
    assert calls(program) == ["aten.einsum"]


def test_refuses_a_broadcast_axis() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "t", 1)
    w = b.const("w", whole(3, 5, 6))
    program = finish(b, b.call(aten.einsum.default, "tk,enk->ten", [x, w]))
    assert refusal(program, SpellWideEinsum())[0] is MissCode.SHAPE
