"""Journeys are what they say, and the figures are worked out right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from tests.support.bench.results import SETTING
from tests.support.values import bits_same

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.errors import OptionsError
from qfuse.ir.stages.verify import verify
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.optimize.schedule import move
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.run import random_inputs
from qfuse_bench.experiments.phase_time import PhaseOptions, PhaseRow, run_phase_cost, verdicts
from qfuse_bench.harness.stats import median
from qfuse_bench.report.markdown import render
from qfuse_bench.workloads.movement_graphs import KINDS, calls_in, movement_graph

ROW = PhaseRow("joins", 100, 7, (0.1, 0.2), (0.3, 0.2), (0.1, 0.4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_journey_has_so_many_calls_and_repeats_itself(kind: str) -> None:
    small, large = movement_graph(kind, 1), movement_graph(kind, 100)
    verify(large)

    assert calls_in(large) >= 100
    assert calls_in(large) % calls_in(small) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_phase_has_work_to_do_and_keeps_every_bit(kind: str) -> None:
    program = movement_graph(kind, 1)
    source = clone(program)
    context = RewriteContext("optimize", CostModel(CostProfile.pinned()))
    Combine().run(program, context)
    moved = move(program, context)
    merged = MergeLinears().run(program, context).fired
    verify(program)

    expected = {
        "attention": {"lift-quantize", "merge-linears"},
        "tokens": {"lift-choose", "lift-quantize", "merge-linears"},
        "joins": {"lift-quantize", "sink-dequantize", "cancel-quantize"},
        "chains": {"sink-dequantize", "cancel-quantize"},
        "ladders": {"lift-quantize", "combine"},
        "all of them": {"lift-choose", "sink-dequantize", "merge-linears"},
    }
    assert set(moved) | set(merged) >= expected[kind]
    inputs = random_inputs(source)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))


def test_seconds_are_of_whole_rounds() -> None:
    assert ROW.seconds == pytest.approx(0.65)
    assert ROW.per_call == pytest.approx(0.0065)


def test_verdicts_name_the_slowest_and_every_growth() -> None:
    twice = replace(ROW, calls=300, move=(2.0, 2.0))

    assert verdicts([ROW, twice, replace(ROW, graph="chains")]) == [
        "The slowest graph (joins, 300 calls) takes 2.4 s; the aim is at most 10 s.",
        "joins: from 100 to 300 calls the cost per call changes by a factor of 1.23.",
    ]


def test_the_page_shows_the_rows() -> None:
    text = render("phase-cost", rows=[ROW], setting=SETTING, verdicts=["One."], median=median)

    assert "| joins | 100 | 7 | 150 | 250 | 250 | 6500 |" in text
    assert "Some CPU" in text
    assert "One." in text


def test_refuses_what_cannot_be_measured() -> None:
    with pytest.raises(OptionsError, match="cannot be measured"):
        run_phase_cost(PhaseOptions(most=10), Console(quiet=True))
