"""What is asked of whom, and that an outcome follows from intervals alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
from rich.console import Console
from tests.support.bench.results import SETTING, entry

from qfuse.zoo import recipes
from qfuse_bench.experiments import goal_run
from qfuse_bench.experiments.goal_run import CellResult, GoalResults, GoalRun, run_goals
from qfuse_bench.experiments.goals import (
    CELLS,
    CONVNET_CELLS,
    Bar,
    Cell,
    Outcome,
    Way,
    findings_of,
)
from qfuse_bench.harness.comparison import Entry, Verdict
from qfuse_bench.harness.measure import Series
from qfuse_bench.peers.cases import CASES, CONVNETS
from qfuse_bench.peers.contenders import Engine, FloatType
from qfuse_bench.report.markdown import render

CASE = "llama-decode"
OURS = Way(Engine.QFUSE, FloatType.F32, "w4a8")
FIRST, SECOND = (Way(Engine.INDUCTOR, FloatType.F32, recipe) for recipe in ("w8a16", "w4a8"))
OTHER = Way(Engine.OPENVINO, FloatType.F32, "w4a8")
CELL = Cell(CASE, OURS, (Bar("all roads", 1.5, (FIRST, SECOND)), Bar("OpenVINO", 1.0, (OTHER,))))


def name(way: Way) -> str:
    return way.on(CASES[CASE]).name


def seen(way: Way, seconds: float | list[float], **changes: object) -> Entry:
    """Somebody who took so long in every round, or in each of them."""
    made = entry(way.on(CASES[CASE]), 1.0, 20.0)
    rounds = [seconds] * 15 if isinstance(seconds, float) else seconds
    return replace(made, series=Series(rounds, rounds), **changes)  # type: ignore[arg-type]


def outcomes(*entries: Entry) -> list[Outcome]:
    found = findings_of(CELL, {entry.name: entry for entry in entries})
    return [finding.outcome for finding in found]


def test_a_bar_is_met_against_every_rival_or_missed_against_one() -> None:
    fast, slow, ours = seen(FIRST, 0.031), seen(SECOND, 0.05), seen(OURS, 0.02)

    assert outcomes(ours, fast, slow) == [Outcome.MET, Outcome.NOT_MEASURED]
    assert outcomes(ours, replace(fast, series=Series([0.029] * 15)), slow)[0] is Outcome.MISSED
    assert outcomes(ours, slow)[0] is Outcome.MET


def test_the_best_rival_is_named_with_its_ratio() -> None:
    entries = [seen(OURS, 0.02), seen(FIRST, 0.05), seen(SECOND, 0.04)]
    first, _ = findings_of(CELL, {entry.name: entry for entry in entries})

    assert first.best == name(SECOND)
    assert first.ratio is not None
    assert first.ratio.value == pytest.approx(0.5)


def test_rounds_that_disagree_do_not_tell() -> None:
    mixed = [0.01, 0.02] * 8
    assert outcomes(seen(OURS, mixed), seen(FIRST, [0.0225] * 16))[0] is Outcome.UNDECIDED


def test_ahead_means_the_whole_interval() -> None:
    ours = seen(OURS, 0.02)

    assert outcomes(ours, seen(OTHER, 0.021))[1] is Outcome.MET
    assert outcomes(ours, seen(OTHER, 0.019))[1] is Outcome.MISSED


def test_a_wrong_rival_is_no_rival() -> None:
    ours, slow = seen(OURS, 0.02), seen(SECOND, 0.05)
    wrong = seen(FIRST, 0.001, verdict=Verdict.WRONG, reason="its answers are wrong")

    assert outcomes(ours, wrong, slow)[0] is Outcome.MET
    (found, _) = findings_of(CELL, {e.name: e for e in (ours, wrong)})
    assert (found.outcome, found.reason) == (Outcome.NOT_MEASURED, "its answers are wrong")


def test_without_a_time_of_ours_nothing_is_met() -> None:
    failed = seen(OURS, 0.001, verdict=Verdict.FAILED, reason="it fell over")

    assert outcomes(failed, seen(FIRST, 1.0), seen(OTHER, 1.0)) == [Outcome.NOT_MEASURED] * 2


def test_the_goals_are_those_of_the_models_and_recipes_that_there_are() -> None:
    for cell in CELLS:
        assert cell.case in CASES
        assert cell.ours.engine is Engine.QFUSE
        assert {way.recipe for way in cell.ways} <= set(recipes.names())
        for way in cell.ways:
            assert way.float_type is cell.ours.float_type, "float types are compared alike"
            assert way.on(CASES[cell.case]).zoo_recipe in recipes.names()


def test_what_the_goals_ask() -> None:
    asked = {(c.case, c.ours.recipe, c.ours.float_type, b.factor) for c in CELLS for b in c.bars}

    for kind in FloatType:
        assert ("llama-prefill", "w8a8-dynamic", kind, 1.5) in asked
        assert ("llama-decode", "w4a8", kind, 1.5) in asked
    for case in ("llama-prefill", "minilm"):
        assert (case, "w8a8-static", FloatType.BF16, 1.15) in asked
        assert (case, "w8a8-static", FloatType.F32, 1.0) in asked
    narrowed = {c.ours.narrowed for c in CELLS if c.ours.recipe == "w8a8-static"}
    assert narrowed == {True, False}
    for cell in CELLS:
        static_bf16 = (cell.ours.recipe, cell.ours.float_type) == ("w8a8-static", FloatType.BF16)
        assert cell.ours.narrowed == static_bf16
    engines = {way.engine for cell in CELLS for way in cell.ways}
    assert {Engine.OPENVINO, Engine.ONNX_RUNTIME, Engine.INDUCTOR} <= engines


def test_other_engines_have_weights_of_as_many_bits() -> None:
    others = (Engine.OPENVINO, Engine.ONNX_RUNTIME)
    for cell in CELLS:
        assert {w.recipe for w in cell.ways if w.engine in others} <= {cell.ours.recipe}


def results() -> GoalResults:
    wrong = seen(SECOND, 0.001, verdict=Verdict.WRONG, reason="its answers are wrong", sqnr=1.0)
    entries = {e.name: e for e in (seen(FIRST, 0.04), wrong, seen(OURS, 0.02))}
    broken = CellResult(CELL, {}, 0.0, "the float model fell over")
    return GoalResults(
        SETTING, 15, (CellResult(CELL, entries, 0.02), broken), {"openvino": "not installed"}
    )


def test_the_page_shows_goals_times_and_who_is_not_there() -> None:
    text = render("goals", results=results())

    ours = "| llama-decode: qfuse f32 w4a8 | all roads | inductor f32 w8a16 | 0.67 "
    assert ours + "| 0.50 [0.50, 0.50] | met |" in text
    assert "| OpenVINO | - | 1.00 | - | not measured: no rival was measured |" in text
    assert "| llama-decode | qfuse f32 w4a8 | 20.0 (20.0) | 20 | 100 (200) |" in text
    assert "| llama-decode | inductor f32 w4a8 | WRONG (1 dB) | 1 |" in text
    assert "- openvino: not installed" in text
    assert "- llama-decode: qfuse f32 w4a8: the float model fell over" in text
    assert text.index("| qfuse f32 w4a8 | 20.0") < text.index("| inductor f32 w8a16 | 40.0")


def test_convnets_have_a_page_of_the_same_form_and_cells_against_every_engine() -> None:
    assert (
        render("convnets", results=results()).strip() == render("goals", results=results()).strip()
    )
    assert [cell.case for cell in CONVNET_CELLS] == list(CONVNETS)
    for cell in CONVNET_CELLS:
        assert {way.engine for way in cell.ways} == {
            Engine.QFUSE,
            Engine.INDUCTOR,
            Engine.OPENVINO,
            Engine.ONNX_RUNTIME,
        }
        assert {(way.recipe, way.float_type) for way in cell.ways} == {
            ("w8a8-static", FloatType.F32)
        }


def test_json_holds_findings_and_entries() -> None:
    data = json.loads(json.dumps(results().to_dict()))

    first, second = data["cells"]
    assert [f["outcome"] for f in first["findings"]] == ["met", "not measured"]
    assert [e["verdict"] for e in first["entries"]] == ["ok", "ok", "WRONG"]
    assert (second["findings"], second["reason"]) == ([], "the float model fell over")


def test_a_run_leaves_out_who_is_not_installed_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: goals -->\n<!-- end: goals -->\n")
    asked = []

    class Pretend:
        def __init__(self, *_: object) -> None:
            self.names: list[str] = []

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def enter(self, competitors: list[object]) -> None:
            self.names += [competitor.name for competitor in competitors]  # type: ignore[attr-defined]

        def run(self, *_: object) -> dict[str, Entry]:
            asked.extend(self.names)
            made = entry(OURS.on(CASES[CASE]), 0.01, 20.0)
            return {name: replace(made, name=name) for name in self.names}

    monkeypatch.setattr(goal_run, "Comparison", Pretend)
    monkeypatch.setattr(goal_run, "prepare_machine", lambda _: None)
    monkeypatch.setattr(goal_run, "example_inputs", lambda *_: [])
    absent = "not installed: pip install openvino"
    monkeypatch.setattr(
        goal_run, "missing", lambda engine: absent if engine is Engine.OPENVINO else None
    )
    out = io.StringIO()
    run = GoalRun(setting=SETTING, rounds=15, patience=0.0, cells=(CELL,), page=page)
    found = run_goals(run, Console(file=out, width=200))

    assert name(OTHER) not in asked
    assert name(OURS) in asked
    assert found.absent["openvino"] == absent
    assert [f.outcome for c in found.cells for f in c.findings] == [
        Outcome.MISSED,
        Outcome.NOT_MEASURED,
    ]
    assert absent in out.getvalue()
    assert f"- openvino: {absent}" in page.read_text()
