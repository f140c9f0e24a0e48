"""``python -m qfuse_bench.experiments.ablation``: Llama with and without move, combine and merge.

Two processes run the same quantized model: compiled by qfuse, and without the rewrites that move
quantization, combine equal nodes, merge siblings, and fuse ops that became adjacent. They are timed
in the same interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console

from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.optimize import ATTENTION, FUSING, rewrite_names
from qfuse_bench.experiments.before_after import (
    DECODE,
    PREFILL,
    Experiment,
    GainResults,
    Pair,
    RunOptions,
    run_experiment,
)
from qfuse_bench.harness.process import WorkerError
from qfuse_bench.peers.cases import RECIPES, Case, pick
from qfuse_bench.peers.contenders import Contender, Engine, FloatType

CASES: Mapping[str, Case] = {case.name: case for case in (PREFILL, DECODE)}
"""By name."""

_USUAL_RECIPES = ("static", "dynamic", "weight-only")


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationOptions(RunOptions):
    """What to measure.

    Attributes:
        cases: Names out of :data:`CASES`; none is all.
        recipes: Names out of :data:`qfuse_bench.peers.cases.RECIPES`; none is those with int8
            weights.
    """

    cases: tuple[str, ...] = field(
        default=(), metadata={"help": f"what to measure, out of {', '.join(CASES)} [all]"}
    )
    recipes: tuple[str, ...] = field(
        default=(), metadata={"help": f"how to quantize, out of {', '.join(RECIPES)} [int8]"}
    )


def phase() -> tuple[str, ...]:
    """Return the names of the rewrites that this phase is."""
    return tuple(sorted(rewrite_names() - FUSING - ATTENTION))


def experiment() -> Experiment:
    """Return the experiment."""
    return Experiment(
        pair=_pair,
        title="Llama without and with moving, combining and merging",
        columns=("recipe", "before", "after"),
        cause="by this phase",
        section="phase-gain",
        facts={"without": phase()},
        prepare=True,
    )


def run_ablation(options: AblationOptions, console: Console | None = None) -> GainResults:
    """Measure, show a table, and write the requested files.

    Raises:
        OptionsError: A case, a recipe or a number does not exist.
    """
    cases = [CASES[name] for name in pick(options.cases, CASES, "case")]
    recipes = pick(options.recipes or _USUAL_RECIPES, RECIPES, "recipe")
    return run_experiment(experiment(), cases, recipes, options, console)


def _pair(case: Case, form: str) -> Pair:
    recipe = RECIPES[form]
    before, after = (
        Contender(
            engine=Engine.QFUSE,
            float_type=FloatType.F32,
            model=case.model,
            sizes=case.sizes,
            recipe=recipe,
            without=without,
        )
        for without in (phase(), ())
    )
    return Pair(before, after, recipe)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(AblationOptions)
def main(**given: Any) -> None:
    """Measure Llama before and after moving, combining and merging."""
    with exit_on_error(WorkerError):
        run_ablation(AblationOptions(**given))


if __name__ == "__main__":
    main()
