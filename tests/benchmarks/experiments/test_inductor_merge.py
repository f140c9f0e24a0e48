"""Both contenders are the same model under the same Inductor, and gains are told as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from tests.support.bench.results import SETTING, entry

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.ablation import Gain
from qfuse_bench.experiments.inductor_merge import (
    FORMS,
    ConcatOptions,
    ConcatResults,
    run_concat_gain,
)
from qfuse_bench.peers.contenders import Contender, Engine, FloatType
from qfuse_bench.report.markdown import render

APART = Contender(
    engine=Engine.INDUCTOR, float_type=FloatType.F32, model="llama", recipe="w8a8-dynamic"
)
MERGED = replace(APART, engine=Engine.INDUCTOR_QFUSE)


def gain(apart: float, merged: float) -> Gain:
    before, after = entry(APART, apart, 20.0), entry(MERGED, merged, 20.0)
    return Gain("prefill", "a prompt", "dynamic", before, after, 0.0)


def test_the_two_differ_in_the_engine_alone() -> None:
    assert Contender.from_dict(MERGED.to_dict()) == MERGED
    assert APART.name != MERGED.name
    assert replace(MERGED, engine=APART.engine) == APART


@pytest.mark.parametrize(("merged", "told"), [(0.8, "faster"), (1.3, "slower")])
def test_gains_and_losses_are_told(merged: float, told: str) -> None:
    results = ConcatResults(SETTING, 15, (gain(1.0, merged),))
    (line,) = results.verdicts()
    assert told in line
    assert results.to_dict()["gains"][0]["ratio"]["value"] == pytest.approx(merged, rel=0.05)
    assert line in render("concat-gain", results=results)


@pytest.mark.parametrize(
    "options", [ConcatOptions(cases=("no",)), ConcatOptions(forms=("no",)), ConcatOptions(rounds=2)]
)
def test_what_does_not_exist_is_an_error(options: ConcatOptions) -> None:
    with pytest.raises(OptionsError):
        run_concat_gain(options, Console(quiet=True))


def test_every_form_is_a_recipe_of_the_zoo() -> None:
    from qfuse.zoo import recipes  # noqa: PLC0415 - brings torchao

    names = {recipe for recipe, _ in FORMS.values() if recipe is not None}
    assert names <= set(recipes.names())
