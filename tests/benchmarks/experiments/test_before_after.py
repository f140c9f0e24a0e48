"""Gains are worked out right, and told whatever they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.bench.results import SETTING, entry

from qfuse_bench.experiments import ablation, inductor_merge
from qfuse_bench.experiments.before_after import (
    Experiment,
    Gain,
    GainResults,
    RunOptions,
    _table,
    outputs_of,
)
from qfuse_bench.harness.comparison import Verdict
from qfuse_bench.peers.contenders import Contender, Engine, FloatType
from qfuse_bench.report.markdown import render

BEFORE = Contender(
    engine=Engine.QFUSE, float_type=FloatType.F32, model="llama", without=("combine",)
)
AFTER = replace(BEFORE, without=())
BOTH = pytest.mark.parametrize(
    "experiment", [ablation.experiment(), inductor_merge.EXPERIMENT], ids=["ablation", "merge"]
)


def gain(before: float, after: float) -> Gain:
    old, new = entry(BEFORE, before, 20.0), entry(AFTER, after, 21.0)
    return Gain("prefill", "a prompt", "dynamic", old, new, 0.0)


@BOTH
def test_verdicts_state_the_gain_whatever_it_is(experiment: Experiment) -> None:
    failed = replace(
        gain(1.0, 1.0), after=replace(gain(1, 1).after, verdict=Verdict.FAILED, reason="no")
    )
    gains = (gain(0.04, 0.03), gain(0.02, 0.03), gain(1, 1), failed)
    results = GainResults(experiment, SETTING, 15, gains)

    assert results.verdicts() == [
        f"prefill, dynamic: 25% faster {experiment.cause}.",
        f"prefill, dynamic: 50% slower {experiment.cause}.",
        "prefill, dynamic: no difference that the rounds can tell.",
        "prefill, dynamic: not measured: no.",
    ]


@BOTH
def test_page_file_and_terminal_show_the_gains(experiment: Experiment, tmp_path: Path) -> None:
    results = GainResults(experiment, SETTING, 15, (gain(0.04, 0.03),))
    page, file = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text(f"<!-- begin: {experiment.section} -->\n<!-- end: {experiment.section} -->\n")
    outputs_of(experiment, RunOptions(page=page, json=file)).write(
        results.to_dict(), results=results
    )
    console = Console(width=200)
    with console.capture() as shown:
        console.print(_table(results))

    form, before, after = experiment.columns
    head = f"| model | {form} | {before}, ms | {after}, ms | {after} / {before} [95 % interval] |"
    row = (
        "| prefill: a prompt | dynamic | 40.0 (40.0) | 30.0 (30.0) | 0.75 [0.75, 0.75] | 20 / 21 |"
    )
    for text in (head, row, f"- prefill, dynamic: 25% faster {experiment.cause}."):
        assert text in page.read_text()
    for text in (experiment.title, form, before, after, "30.0 (30.0)", "0.75 [0.75, 0.75]"):
        assert text in shown.get()
    assert json.loads(file.read_text())["gains"][0]["ratio"]["value"] == pytest.approx(0.75)


def test_the_load_that_counts_is_the_greatest() -> None:
    gains = (replace(gain(1, 1), others=0.1), replace(gain(1, 1), others=0.4))

    assert GainResults(inductor_merge.EXPERIMENT, SETTING, 15, gains).others == 0.4
    assert "up to\n40% of the cores" in render(
        "gain", results=GainResults(inductor_merge.EXPERIMENT, SETTING, 15, gains)
    )
