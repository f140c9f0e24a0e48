"""Predicted against measured times of the alternatives for a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.bench.results import SETTING

from qfuse.cost import CostProfile
from qfuse.lower import Measurer
from qfuse_bench.experiments import predictions as experiment
from qfuse_bench.experiments.predictions import (
    RECIPES,
    PathResult,
    Prediction,
    PredictionOptions,
    Summary,
    predict,
    prediction_table,
    run_predictions,
)
from qfuse_bench.report.markdown import render

pytestmark = pytest.mark.own_kernels


def counted(runs: Sequence[Callable[[], object]]) -> list[float]:
    """The first takes 1 ms, the second 2 ms, and so on."""
    return [1e-3 * (index + 1) for index, _ in enumerate(runs)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_alternative_has_both_times(recipe: object) -> None:
    assert isinstance(recipe, type(RECIPES[0]))
    measurer = Measurer(9.0, counted, lambda: 0.0, close=None)
    cell = predict(recipe, 8, (64, 128), CostProfile.pinned(), measurer)

    assert cell.predicted.keys() == cell.measured.keys()
    assert {"float", f"qfuse.linear_{recipe.name}"} <= cell.measured.keys()
    assert len(cell.errors) == len(cell.measured)


MEASURED = {"a": 1.0, "b": 1.04, "float": 2.0}
MADE = tuple(
    Prediction("w8a8", 1, (8, 8), {"a": 1.5, "b": 1.04, "float": 1.0}, MEASURED, chosen)
    for chosen in ("a", "b", "float")
)
PATH = PathResult("avx2", CostProfile.pinned(), MADE)


def test_a_choice_is_close_to_the_fastest() -> None:
    assert [cell.is_close for cell in MADE] == [True, True, False]
    assert sorted(MADE[0].errors) == [0.0, 0.5, 0.5]

    table = prediction_table(PATH)
    assert [list(column.cells) for column in table.columns] == [
        *(["w8a8", "all"], ["3", "3"], ["50%", "50%"], ["50%", "50%"], ["2 (67%)", "2 (67%)"])
    ]


@pytest.mark.parametrize(
    ("error", "close", "said"),
    [(0.15, 19, ["met", "met"]), (0.16, 19, ["missed", "met"]), (0.15, 18, ["met", "missed"])],
)
def test_aims_are_met_or_missed(error: float, close: int, said: list[str]) -> None:
    verdict = Summary("all", 20, error, 0.0, close).verdict

    assert [part.rpartition(": ")[2] for part in verdict.split("; ")] == said


def test_the_page_has_a_table_per_instruction_set_and_every_miss() -> None:
    busy = replace(CostProfile.pinned(), quiet=False)
    paths = [PATH, PathResult("portable", busy, MADE[:1])]
    text = render("predictions", setting=SETTING, paths=paths, others=0.5)

    assert "Some CPU" in text
    assert "50% of the cores meanwhile: the misses may be theirs." in text
    assert f"`avx2`: {PATH.summaries[-1].verdict}." in text
    assert "`portable` (speeds measured on one thread" in text
    assert (
        "\n| w8a8 | 3 | 50% | 50% | 2 (67%) |\n| all | 3 | 50% | 50% | 2 (67%) |\n\n- w8a8" in text
    )
    assert text.count("- w8a8 1 x 8 x 8: float chosen; predicted -> measured: a 1500000") == 1


def test_a_quick_run_writes_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = iter([replace(CostProfile.pinned(), quiet=quiet) for quiet in (False, True)])
    monkeypatch.setattr(experiment, "measure", lambda _: next(profiles))
    monkeypatch.setattr(experiment, "Measurer", partial(Measurer, timer=counted))
    monkeypatch.setattr(experiment, "_QUICK_SIZES", ((32, 64),))
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: predictions -->\n<!-- end: predictions -->\n")
    options = PredictionOptions(quick=True, isa=("portable",), page=page)
    (found,) = run_predictions(options, Console(quiet=True))

    # It was busy at first, and a quiet measurement is enough.
    assert next(profiles, None) is None
    assert found.profile.quiet
    assert [summary.cells for summary in found.summaries] == [3, 3, 3, 9]
    assert found.summaries[-1].verdict in page.read_text()
