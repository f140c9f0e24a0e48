"""``python -m qfuse_bench.experiments.inductor_merge``: merging linears inside Inductor.

Two processes hold the same model under the same frozen ``torch.compile``, one of them with
:func:`qfuse.inductor_options`. They are timed in the same interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console

from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse_bench.experiments.before_after import (
    DECODE,
    Experiment,
    GainResults,
    Pair,
    RunOptions,
    run_experiment,
)
from qfuse_bench.harness.process import WorkerError
from qfuse_bench.peers.cases import Case, pick
from qfuse_bench.peers.contenders import Contender, Engine, FloatType

_ROWS = (1, 4, 32, 256)
_MINILM = Case("minilm", "minilm", "6 layers, 16 sentences x 64 tokens", {"batch": 16})


def _prompts(what: str, sizes: Mapping[str, int]) -> tuple[Case, ...]:
    """Return Llama with prompts of so many tokens, which are the rows of its products."""
    return tuple(
        Case(f"rows-{rows}", "llama", f"Llama, {what}", {**sizes, "seq": rows}) for rows in _ROWS
    )


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (*_prompts("4 layers, hidden 1024, 16 heads over 8", {}), DECODE, _MINILM)
}
"""By name."""

QUICK_CASES: Mapping[str, Case] = {
    case.name: case
    for case in _prompts(
        "2 layers, hidden 512, 8 heads over 4",
        {
            "layers": 2,
            "hidden": 512,
            "heads": 8,
            "kv_heads": 4,
            "intermediate": 1408,
            "vocab": 1024,
        },
    )
}
"""Those of ``--quick``, by name."""

FORMS: Mapping[str, tuple[str | None, FloatType]] = {
    "dynamic": ("w8a8-dynamic", FloatType.F32),
    "static": ("w8a8-static", FloatType.F32),
    "weight-only 4 bits": ("w4a16", FloatType.BF16),
    "float": (None, FloatType.BF16),
}
"""What the linears are made of: the zoo's recipe, and what is not quantized is computed in."""

_QUICK_FORMS = ("dynamic", "float")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions(RunOptions):
    """What to measure.

    Attributes:
        cases: Names out of :data:`CASES`; none is all.
        forms: Names out of :data:`FORMS`; none is all.
        quick: A narrow Llama only, in two forms.
    """

    cases: tuple[str, ...] = field(
        default=(), metadata={"help": f"what to measure, out of {', '.join(CASES)} [all]"}
    )
    forms: tuple[str, ...] = field(
        default=(), metadata={"help": f"kinds of linears, out of {', '.join(FORMS)} [all]"}
    )
    quick: bool = field(
        default=False, metadata={"help": "a narrow Llama only, in less than ten minutes"}
    )


def run_merge(options: MergeOptions, console: Console | None = None) -> GainResults:
    """Measure, show a table, and write the requested files.

    Raises:
        OptionsError: A case, a form or a number does not exist.
    """
    known = QUICK_CASES if options.quick else CASES
    cases = [known[name] for name in pick(options.cases, known, "case")]
    forms = pick(options.forms or (_QUICK_FORMS if options.quick else ()), FORMS, "form")
    return run_experiment(EXPERIMENT, cases, forms, options, console)


def _pair(case: Case, form: str) -> Pair:
    recipe, float_type = FORMS[form]
    before, after = (
        Contender(
            engine=engine, float_type=float_type, model=case.model, sizes=case.sizes, recipe=recipe
        )
        for engine in (Engine.INDUCTOR, Engine.INDUCTOR_QFUSE)
    )
    return Pair(before, after, recipe)


EXPERIMENT = Experiment(
    pair=_pair,
    title="torch.compile, frozen, without and with merged linears",
    columns=("linears", "apart", "merged"),
    cause="with merged linears",
    section="concat-gain",
)
"""The experiment."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(MergeOptions)
def main(**given: Any) -> None:
    """Measure what merging linears inside torch.compile gains."""
    with exit_on_error(WorkerError):
        run_merge(MergeOptions(**given))


if __name__ == "__main__":
    main()
