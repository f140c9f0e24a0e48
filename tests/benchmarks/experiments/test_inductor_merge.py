"""Both contenders are the same model under the same Inductor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments import inductor_merge
from qfuse_bench.experiments.inductor_merge import (
    CASES,
    EXPERIMENT,
    FORMS,
    QUICK_CASES,
    MergeOptions,
    run_merge,
)
from qfuse_bench.peers.cases import Case
from qfuse_bench.peers.contenders import Contender, Engine


@pytest.mark.parametrize("form", FORMS)
def test_the_two_differ_in_the_engine_alone(form: str) -> None:
    pair = EXPERIMENT.pair(CASES["minilm"], form)
    apart, merged, recipe = pair.before, pair.after, pair.recipe

    assert (recipe, apart.float_type) == FORMS[form]
    assert Contender.from_dict(merged.to_dict()) == merged
    assert apart.name != merged.name
    assert replace(merged, engine=Engine.INDUCTOR) == apart


def test_gains_are_measured_at_few_and_at_many_rows() -> None:
    rows = {f"rows-{n}": n for n in (1, 4, 32, 256)}

    for cases in (CASES, QUICK_CASES):
        assert {name: case.sizes["seq"] for name, case in cases.items() if name in rows} == rows
    assert set(QUICK_CASES) == set(rows)
    assert {case.model for case in QUICK_CASES.values()} == {"llama"}


def test_quick_is_a_narrow_model_in_the_forms_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[list[Case], list[str]]] = []
    monkeypatch.setattr(
        inductor_merge,
        "run_experiment",
        lambda _, cases, forms, *__: asked.append((list(cases), list(forms))),
    )
    run_merge(MergeOptions(quick=True))
    run_merge(MergeOptions(quick=True, cases=("rows-4",), forms=("static",)))

    (cases, forms), (one, form) = asked
    assert cases == list(QUICK_CASES.values())
    assert set(forms) < set(FORMS)
    assert (one, form) == ([QUICK_CASES["rows-4"]], ["static"])


@pytest.mark.parametrize(
    "options",
    [
        MergeOptions(cases=("no",)),
        MergeOptions(quick=True, cases=("minilm",)),
        MergeOptions(forms=("no",)),
        MergeOptions(rounds=2),
    ],
)
def test_what_does_not_exist_is_an_error(options: MergeOptions) -> None:
    with pytest.raises(OptionsError):
        run_merge(options, Console(quiet=True))


def test_every_form_is_a_recipe_of_the_zoo() -> None:
    from qfuse.zoo import recipes  # noqa: PLC0415 - brings torchao

    names = {recipe for recipe, _ in FORMS.values() if recipe is not None}
    assert names <= set(recipes.names())
