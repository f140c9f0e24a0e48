"""Single passes over random graphs: the same bits, strides and names, and nothing left to do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.graphs.raw_fx import bits_of
from tests.support.sources.dialects import difference, equal_but_for_nan, strides
from tests.support.strategies.linear_steps import Case
from tests.support.strategies.linear_steps import cases as linear_cases
from tests.support.strategies.movement_steps import move_cases as movement_cases

from qfuse.passes import (
    CancelQuantize,
    GraphPass,
    LiftCombineQuantize,
    MergeLinears,
    SinkDequantize,
)
from qfuse.rewrite.clone import clone
from qfuse.testing.run import run

pytestmark = [pytest.mark.property, pytest.mark.numeric]
MOVING = st.sampled_from([LiftCombineQuantize, SinkDequantize, CancelQuantize])


@given(case=movement_cases(), kind=MOVING)
def test_moving_passes_change_no_bit(case: Case, kind: type[GraphPass]) -> None:
    program, inputs = clone(case.program), case.inputs()
    before = run(program, inputs)
    outcome = kind()(program.module)
    after = run(program, inputs)

    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert equal_but_for_nan(old, new), f"{difference(old, new)}\n{outcome}"
        assert strides(old) == strides(new)
    graph = program.module.graph
    graph.lint()
    assert not kind()(program.module).modified
    assert program.module.graph is graph


@given(case=linear_cases(exact=False))
def test_merging_changes_no_bit_of_a_sum_in_one_order(case: Case) -> None:
    program, inputs = clone(case.program), case.inputs()
    before = bits_of(program.module, inputs)
    steps = [strides(value) for value in run(program, inputs)]
    outcome = MergeLinears()(program.module)

    for old, new in zip(before, bits_of(program.module, inputs), strict=True):
        assert equal_but_for_nan(old, new), f"{difference(old, new)}\n{outcome}"
    after = run(program, inputs)
    assert steps == [strides(value) for value in after]
    assert not MergeLinears()(program.module).modified
    assert {t.device for t in after} <= {torch.device("cpu")}
