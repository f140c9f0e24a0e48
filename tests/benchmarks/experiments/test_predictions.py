"""Predicted against measured times of the alternatives for a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from qfuse.cost import CostProfile
from qfuse.lower import Measurer
from qfuse_bench.experiments.predictions import RECIPES, Prediction, predict, prediction_table

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


def test_a_choice_is_close_to_the_fastest() -> None:
    measured = {"a": 1.0, "b": 1.04, "float": 2.0}
    made = [
        Prediction("w8a8", 1, (8, 8), {"a": 1.5, "b": 1.04, "float": 1.0}, measured, chosen)
        for chosen in ("a", "b", "float")
    ]
    assert [cell.is_close for cell in made] == [True, True, False]
    assert sorted(made[0].errors) == [0.0, 0.5, 0.5]

    table = prediction_table("avx2", made)
    assert [list(column.cells) for column in table.columns] == [
        *(["w8a8", "all"], ["3", "3"], ["50%", "50%"], ["50%", "50%"], ["2 (67%)", "2 (67%)"])
    ]
