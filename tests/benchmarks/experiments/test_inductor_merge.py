"""Both contenders are the same model under the same Inductor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.inductor_merge import (
    CASES,
    EXPERIMENT,
    FORMS,
    MergeOptions,
    run_merge,
)
from qfuse_bench.peers.contenders import Contender, Engine


@pytest.mark.parametrize("form", FORMS)
def test_the_two_differ_in_the_engine_alone(form: str) -> None:
    pair = EXPERIMENT.pair(CASES["minilm"], form)
    apart, merged, recipe = pair.before, pair.after, pair.recipe

    assert (recipe, apart.float_type) == FORMS[form]
    assert Contender.from_dict(merged.to_dict()) == merged
    assert apart.name != merged.name
    assert replace(merged, engine=Engine.INDUCTOR) == apart


@pytest.mark.parametrize(
    "options", [MergeOptions(cases=("no",)), MergeOptions(forms=("no",)), MergeOptions(rounds=2)]
)
def test_what_does_not_exist_is_an_error(options: MergeOptions) -> None:
    with pytest.raises(OptionsError):
        run_merge(options, Console(quiet=True))


def test_every_form_is_a_recipe_of_the_zoo() -> None:
    from qfuse.zoo import recipes  # noqa: PLC0415 - brings torchao

    names = {recipe for recipe, _ in FORMS.values() if recipe is not None}
    assert names <= set(recipes.names())
