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
from qfuse.normalize.aten.linear.batched_einsum import SpellBatchedEinsum
from qfuse.rewrite.clone import clone
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

SIZES: dict[str, int | str] = {"b": "b", "e": 3, "n": 5, "k": 6, "o": 1}
RULE = SpellBatchedEinsum()


def source(equation: str, *, constant: bool = True) -> CapturedGraph:
    """Return an einsum of an activation, which has the letter ``b``, and a weight."""
    b = GraphBuilder()
    operands = []
    for term in equation.split("->", maxsplit=1)[0].split(","):
        shape = [SIZES[name] for name in term]
        if "b" in term or not constant:
            operands.append(b.arg("x" if "b" in term else "y", torch.float32, *shape))
        else:
            operands.append(b.const("w", whole(*(int(size) for size in shape))))
    return finish(b, b.call(aten.einsum.default, equation, operands))


def test_golden_a_weight_for_each_expert() -> None:
    assert_expected_inline(
        golden(source("ebk,enk->ebn"), RULE),
        """\
%x: float32[3, s0, 6]
const %w: float32[3, 5, 6]
%0 = aten.permute(%w, (0, 2, 1)): float32[3, 6, 5]
%1 = aten.bmm(%x, %0): float32[3, s0, 5]
return (%1)
fired: spell-batched-einsum 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(
    "equation", ["ebk,enk->ebn", "ebk,ekn->ebn", "enk,ebk->ebn", "bek,nek->ebn", "ekb,kne->ebn"]
)
def test_same_values_and_strides(equation: str) -> None:
    program = source(equation)
    inputs = random_inputs(program, b=7)
    (want,) = run(clone(program), inputs)
    assert assert_same_values(program, inputs, RULE).fired == {RULE.name: 1}
    (got,) = run(program, inputs)
    assert (got.shape, got.stride()) == (want.shape, want.stride())
    assert "aten.bmm" in calls(program)


@pytest.mark.parametrize(
    ("equation", "code"),
    [
        ("bk,enk->ebn", MissCode.PATTERN),
        ("ebk,enk->eb", MissCode.PATTERN),
        ("ebe,enk->ebn", MissCode.PATTERN),
        ("obk,ok->obk", MissCode.PATTERN),
    ],
)
def test_refuses_other_equations(equation: str, code: MissCode) -> None:
    assert refusal(source(equation), RULE)[0] is code


def test_refuses_two_activations() -> None:
    assert refusal(source("ebk,enk->ebn", constant=False), RULE)[0] is MissCode.PATTERN
