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
from qfuse_bench.experiments.aims import AIMS
from qfuse_bench.experiments.goal_results import (
    CellResult,
    GoalResults,
    unlimited_engines,
)
from qfuse_bench.experiments.goal_run import GoalRun, run_goals
from qfuse_bench.experiments.goals import (
    ANY_BITS,
    BEST_RECIPE,
    CELLS,
    CONVNET_CELLS,
    DECODE,
    FLOAT,
    GOAL_RECIPES,
    Bar,
    Cell,
    Outcome,
    Way,
    findings_of,
)
from qfuse_bench.harness.comparison import Entry, Verdict
from qfuse_bench.harness.machine_class import LIMITS, MachineClass
from qfuse_bench.harness.measure import Series
from qfuse_bench.peers.cases import CASES, CONVNETS
from qfuse_bench.peers.contenders import Engine, FloatType
from qfuse_bench.report.markdown import render

CASE = "llama-decode"
OURS = Way(Engine.QFUSE, FloatType.F32, "w4a8")
FIRST, SECOND = (Way(Engine.INDUCTOR, FloatType.F32, recipe) for recipe in ("w8a16", "w4a8"))
OTHER = Way(Engine.OPENVINO, FloatType.F32, "w4a8")
CELL = Cell(
    CASE, OURS, (Bar("every recipe", 0.67, (FIRST, SECOND)), Bar("OpenVINO", 1.0, (OTHER,)))
)
KIND = MachineClass("avx512_vnni")
HELD = MachineClass("avx512_vnni", tuple(LIMITS["avx2"].items()))


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
        assert {way.recipe for way in cell.ways} <= {None, *recipes.names()}
        for way in cell.ways:
            assert way.float_type is cell.ours.float_type, "float types are compared alike"
            assert way.on(CASES[cell.case]).zoo_recipe in {None, *recipes.names()}


def test_what_the_goals_ask() -> None:
    asked = [(cell.case, cell.recipe, cell.ours.float_type) for cell in CELLS]
    models = ("llama-prefill", "llama-decode", "minilm", "bert", "vit", "whisper")
    grid = {(m, r, k) for m in models for r in GOAL_RECIPES for k in FloatType if r != ANY_BITS}

    assert len(set(asked)) == len(asked)
    assert set(asked) == grid | {(DECODE, ANY_BITS, kind) for kind in FloatType}
    for cell in CELLS:
        static_bf16 = (cell.ours.recipe, cell.ours.float_type) == ("w8a8-static", FloatType.BF16)
        assert cell.ours.narrowed == static_bf16
        bars = {bar.name: bar.most for bar in cell.bars}
        if cell.recipe == ANY_BITS:
            assert bars == {BEST_RECIPE: 0.5}
            continue
        assert bars.pop(FLOAT) == 1.0
        assert set(bars.values()) == {1.05}
        engines = {Engine.INDUCTOR, Engine.OPENVINO}
        if cell.ours.float_type is FloatType.F32 and cell.ours.recipe != "w8a16":
            engines.add(Engine.ONNX_RUNTIME)
        assert {way.engine for way in cell.ways} == engines | {Engine.QFUSE}


def test_one_token_is_compared_with_every_recipe() -> None:
    (f32, bf16) = (cell for cell in CELLS if cell.recipe == ANY_BITS)

    known = {"w8a8-static", "w8a8-dynamic", "w8a16", "w4a8", "w4a16-packed"}
    for cell in (f32, bf16):
        assert {w.recipe for w in cell.ways if w.engine is Engine.INDUCTOR} == known
    assert {w.engine for w in f32.ways} >= {Engine.OPENVINO, Engine.ONNX_RUNTIME}


def test_an_engine_that_cannot_be_limited_is_shown_and_not_judged() -> None:
    entries = {e.name: e for e in (seen(OURS, 0.02), seen(FIRST, 0.04), seen(OTHER, 0.01))}

    first, second = findings_of(CELL, entries, frozenset((Engine.OPENVINO,)))

    assert (first.outcome, second.outcome) == (Outcome.MET, Outcome.UNEQUAL)
    assert second.ratio is not None
    assert second.ratio.value == pytest.approx(2.0)
    assert findings_of(CELL, entries)[1].outcome is Outcome.MISSED


def test_only_under_limits_an_engine_has_more_than_the_others() -> None:
    run = GoalRun(setting=SETTING, rounds=15, patience=0.0, cells=CELLS, kind=HELD)
    cell = CellResult(CELL, {}, 0.0, "no", frozenset((Engine.ONNX_RUNTIME,)))
    held = GoalResults(SETTING, 15, (cell,), {}, HELD)

    assert unlimited_engines(run.kind) == {Engine.ONNX_RUNTIME}
    assert unlimited_engines(KIND) == frozenset()
    assert "onnxruntime has no switch for that" in render("goals", results=held)
    assert "has no switch" not in render("goals", results=results())


def test_a_part_of_the_cells_is_chosen_by_model_recipe_and_float_type() -> None:
    run = GoalRun(
        setting=SETTING, rounds=15, patience=0.0, cells=CELLS, models=("bert", "vit"),
        recipes=("static",), floats=("f32",),
    )  # fmt: skip

    assert [(c.case, c.recipe, c.ours.float_type) for c in run.chosen] == [
        ("bert", "static", FloatType.F32),
        ("vit", "static", FloatType.F32),
    ]
    assert replace(run, models=(), recipes=(), floats=()).chosen == list(CELLS)


def test_other_engines_have_weights_of_as_many_bits() -> None:
    others = (Engine.OPENVINO, Engine.ONNX_RUNTIME)
    for cell in CELLS:
        assert {w.recipe for w in cell.ways if w.engine in others} <= {cell.ours.recipe}


def results() -> GoalResults:
    wrong = seen(SECOND, 0.001, verdict=Verdict.WRONG, reason="its answers are wrong", sqnr=1.0)
    entries = {e.name: e for e in (seen(FIRST, 0.04), wrong, seen(OURS, 0.02))}
    broken = CellResult(CELL, {}, 0.0, "the float model fell over")
    return GoalResults(
        SETTING, 15, (CellResult(CELL, entries, 0.02), broken), {"openvino": "not installed"}, KIND
    )


def test_the_page_shows_goals_times_and_who_is_not_there() -> None:
    text = render("goals", results=results())

    ours = "| llama-decode: qfuse f32 w4a8 | every recipe | inductor f32 w8a16 | 0.67 "
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

        def leave(self, names: list[str]) -> None:
            self.names = [name for name in self.names if name not in names]

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
    run = GoalRun(setting=SETTING, rounds=15, patience=0.0, cells=(CELL,), kind=HELD, page=page)
    found = run_goals(run, Console(file=out, width=200))

    assert name(OTHER) not in asked
    assert name(OURS) in asked
    assert found.absent["openvino"] == absent
    assert [f.outcome for c in found.cells for f in c.findings] == [
        Outcome.MISSED,
        Outcome.NOT_MEASURED,
    ]
    assert absent in out.getvalue()
    text = page.read_text()
    assert f"- openvino: {absent}" in text
    assert "<!-- begin: goals avx2-forced-on-avx512_vnni -->" in text
    assert "Limited by `QFUSE_ISA=avx2`" in text


def test_float_contenders_are_built_once_per_model_and_float_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[str] = []
    live: list[str] = []

    class Pretend:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            live.clear()

        def enter(self, competitors: list[object]) -> None:
            names = [competitor.name for competitor in competitors]  # type: ignore[attr-defined]
            assert not set(names) & set(live), "names are of one cell"
            live.extend(names)
            built.extend(names)

        def leave(self, names: list[str]) -> None:
            for name in names:
                live.remove(name)

        def run(self, *_: object) -> dict[str, Entry]:
            made = entry(OURS.on(CASES[CASE]), 0.01, 20.0)
            return {name: replace(made, name=name) for name in live}

    monkeypatch.setattr(goal_run, "Comparison", Pretend)
    monkeypatch.setattr(goal_run, "prepare_machine", lambda _: None)
    monkeypatch.setattr(goal_run, "example_inputs", lambda *_: [])
    monkeypatch.setattr(goal_run, "missing", lambda _: None)
    run = GoalRun(
        setting=SETTING,
        rounds=15,
        patience=0.0,
        cells=CELLS,
        models=("bert",),
        kind=KIND,
        aims=AIMS,
    )
    found = run_goals(run, Console(file=io.StringIO(), width=200))

    assert len(found.cells) == 10
    assert built.count("eager f32") == 2
    assert built.count("inductor f32") == built.count("inductor bf16") == 1
    assert built.count("qfuse f32 w4a8") == built.count("qfuse bf16 w4a8") == 1
    for cell in found.cells:
        assert set(cell.entries) == {way.on(CASES["bert"]).name for way in cell.cell.ways}
    aims = {one.aim.name: (one.outcome, one.count, one.of) for one in found.reached()}
    assert aims["all recipes / Inductor + torchao"] == (Outcome.MISSED, 10, 60)
    assert aims["equal bits / ONNX Runtime"] == (Outcome.MISSED, 4, 24)
    assert aims["no cell slower than the float model"] == (Outcome.MET, 10, 60)
    assert aims["one token / the best int8 or int4 recipe"] == (Outcome.NOT_MEASURED, 0, 2)
