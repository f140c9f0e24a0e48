"""A run of the goals that was interrupted goes on with the cells that it has."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.bench.results import SETTING, entry

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments import goal_run
from qfuse_bench.experiments.aims import AIMS
from qfuse_bench.experiments.goal_results import CellResult, GoalResults
from qfuse_bench.experiments.goal_run import GoalRun, run_goals
from qfuse_bench.experiments.goals import CELLS, Cell
from qfuse_bench.experiments.models import BenchOptions, run_bench
from qfuse_bench.harness.comparison import Entry
from qfuse_bench.harness.machine_class import LIMITS, MachineClass
from qfuse_bench.harness.measure import Series
from qfuse_bench.peers.cases import CASES

KIND = MachineClass("avx512_vnni")
HELD = MachineClass("avx512_vnni", tuple(LIMITS["avx2"].items()))


def entries_of(cell: Cell, seconds: float) -> dict[str, Entry]:
    names = [way.on(CASES[cell.case]).name for way in cell.ways]
    series = Series([seconds] * 15, [seconds, 2 * seconds] * 15)
    return {
        name: replace(entry(cell.ours.on(CASES[cell.case]), 1.0, 20.0), name=name, series=series)
        for name in names
    }


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[GoalResults, int]]:
    """Run the goals of one model; cells take 1 s the first time, and one more each time."""
    monkeypatch.setattr(goal_run, "prepare_machine", lambda _: None)
    monkeypatch.setattr(goal_run, "missing", lambda _: None)
    runs = [0]

    def run(**changes: Any) -> tuple[GoalResults, int]:
        runs[0] += 1
        asked: list[Cell] = []

        def measure(cells: list[Cell], *_: object) -> list[CellResult]:
            asked.extend(cells)
            return [CellResult(cell, entries_of(cell, float(runs[0])), 0.0) for cell in cells]

        monkeypatch.setattr(goal_run, "_measure", measure)
        options: dict[str, Any] = {
            "setting": SETTING,
            "rounds": 15,
            "patience": 0.0,
            "cells": CELLS,
            "models": ("llama-decode",),
            "recipes": ("w4a8", "any-bits"),
            "aims": AIMS,
            "kind": KIND,
            "json": tmp_path / "goals.json",
            "resume": True,
        }
        found = run_goals(GoalRun(**options | changes), Console(file=io.StringIO(), width=200))
        return found, len(asked)

    return run


def seconds_of(results: GoalResults) -> list[float]:
    return [one.rows[0].time.median for one in results.cells if one.rows[0].time is not None]


def test_the_cells_of_the_file_are_kept_and_the_others_measured(
    run: Callable[..., tuple[GoalResults, int]],
) -> None:
    first, count = run(floats=("bf16",))
    assert (count, seconds_of(first)) == (2, [1.0, 1.0])

    second, count = run()

    assert count == 2
    # In the order of all cells, each with its recipe: w4a8 and any-bits run the same of ours.
    order = [CELLS.index(one.cell) for one in second.cells]
    assert order == sorted(order)
    kept = [(one.cell.recipe, one.cell.ours.float_type, one.rows[0].time) for one in first.cells]
    found = {(one.cell.recipe, one.cell.ours.float_type): one.rows[0].time for one in second.cells}
    assert [found[recipe, kind] for recipe, kind, _ in kept] == [time for *_, time in kept]
    assert sorted(seconds_of(second)) == [1.0] * 2 + [2.0] * 2
    assert second.reached()[0].count == first.reached()[0].count + 1
    assert run()[1] == 0


def test_a_run_in_parts_keeps_what_it_does_not_ask_for(
    run: Callable[..., tuple[GoalResults, int]],
) -> None:
    run(floats=("bf16",))
    found, count = run(floats=("f32",))

    assert count == 2
    assert [one.cell.ours.float_type for one in found.cells] == ["f32", "f32", "bf16", "bf16"]
    assert sorted(seconds_of(found)) == [1.0] * 2 + [2.0] * 2


def test_what_was_measured_comes_back_as_it_was(
    run: Callable[..., tuple[GoalResults, int]], tmp_path: Path
) -> None:
    first, _ = run()
    second, _ = run()

    assert second == first
    assert json.loads((tmp_path / "goals.json").read_text()) == json.loads(
        json.dumps(first.to_dict())
    )


def test_a_cell_that_an_engine_was_missing_from_is_measured_again(
    run: Callable[..., tuple[GoalResults, int]], tmp_path: Path
) -> None:
    run()
    file = tmp_path / "goals.json"
    data = json.loads(file.read_text())
    data["cells"][0]["entries"].pop()
    data["cells"][1] |= {"entries": [], "reason": "the float model failed"}
    file.write_text(json.dumps(data))

    assert run()[1] == 2


def test_another_day_goes_on_and_other_code_machines_and_rounds_are_refused(
    run: Callable[..., tuple[GoalResults, int]],
) -> None:
    run()

    assert run(setting=replace(SETTING, date="2031-01-01"))[1] == 0
    for changes, what in (
        ({"setting": replace(SETTING, threads=SETTING.threads + 1)}, "setting"),
        ({"setting": replace(SETTING, versions=())}, "setting"),
        ({"rounds": 16}, "rounds"),
        ({"kind": HELD}, "class of machine"),
    ):
        with pytest.raises(OptionsError, match=f"has another {what}"):
            run(**changes)


@pytest.mark.parametrize("text", ["", "[]", '{"rounds": 15}'])
def test_a_file_without_results_is_an_error(
    run: Callable[..., tuple[GoalResults, int]], tmp_path: Path, text: str
) -> None:
    (tmp_path / "goals.json").write_text(text)

    with pytest.raises(OptionsError, match="holds no results"):
        run()
    # Without --resume the file is replaced.
    assert run(resume=False)[1] == 4


@pytest.mark.parametrize(
    "options", [BenchOptions(resume=True, goals=True), BenchOptions(resume=True, json=Path("x"))]
)
def test_resuming_needs_the_goals_and_a_file(options: BenchOptions) -> None:
    with pytest.raises(OptionsError, match="--resume is for --goals and --convnets"):
        run_bench(options)
