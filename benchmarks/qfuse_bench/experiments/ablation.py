"""``python -m qfuse_bench.experiments.ablation``: Llama with and without move, combine and merge.

Two processes run the same quantized model: compiled by qfuse, and without the rewrites that move
quantization, combine equal nodes, merge siblings, and fuse ops that became adjacent. They are timed
in the same interleaved rounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse.optimize import ATTENTION, FUSING, rewrite_names
from qfuse_bench.harness.comparison import Comparison, Entry
from qfuse_bench.harness.machine import BackgroundLoad, Setting, prepare_machine
from qfuse_bench.harness.measure import LEAST_ROUNDS, compare
from qfuse_bench.harness.process import WorkerError
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.harness.stats import Ratio
from qfuse_bench.peers.cases import RECIPES, Case, example_inputs, pick
from qfuse_bench.peers.contenders import Contender, Engine, FloatType, eager_model
from qfuse_bench.report import format as words
from qfuse_bench.report.markdown import write_section
from qfuse_bench.report.tables import ratio_text, setting_text, time_text

CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("prefill", "llama", "4 layers, hidden 1024, 16 heads over 8, prompt of 256 tokens"),
        Case("decode", "llama-decode", "the same, one token, key-value cache of 256", seeds=(0,)),
    )
}
"""By name."""

_SECTION = "phase-gain"
_USUAL_RECIPES = ("static", "dynamic", "weight-only")


@dataclass(frozen=True, slots=True, kw_only=True)
class GainOptions:
    """What to measure.

    Attributes:
        cases: Names out of :data:`CASES`; none is all.
        recipes: Names out of :data:`qfuse_bench.peers.cases.RECIPES`; none is those with int8
        weights. rounds: Interleaved rounds per case and recipe.
        threads: OpenMP threads of every process; 0 takes torch's default.
        patience: Seconds to wait, per case and recipe, for other programs to leave the cores.
        json: Where to write everything that was measured.
        page: A page with a section to write the table into.
    """

    cases: tuple[str, ...] = field(
        default=(), metadata={"help": f"what to measure, out of {', '.join(CASES)} [all]"}
    )
    recipes: tuple[str, ...] = field(
        default=(), metadata={"help": f"how to quantize, out of {', '.join(RECIPES)} [int8]"}
    )
    rounds: int = field(default=21, metadata={"help": "interleaved rounds per case and recipe"})
    threads: int = field(default=0, metadata={"help": "threads; 0 takes torch's default"})
    patience: float = field(
        default=60.0,
        metadata={"help": "seconds to wait, per case and recipe, for other programs to be quiet"},
    )
    json: Path | None = field(
        default=None, metadata={"help": "write everything that was measured to a file"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """One model under one recipe.

    Attributes:
        case: Name of the model and its size.
        what: The size in words.
        recipe: Name of the recipe.
        before: Without the phase.
        after: With it.
        others: The fraction of the machine that other programs used meanwhile.
    """

    case: str
    what: str
    recipe: str
    before: Entry
    after: Entry
    others: float

    @property
    def ratio(self) -> Ratio | None:
        """Time after over time before; ``None`` unless both are valid."""
        if self.before.time is None or self.after.time is None:
            return None
        return compare(self.after.time, self.before.time)


@dataclass(frozen=True, slots=True)
class GainResults:
    """A whole run."""

    setting: Setting
    rounds: int
    gains: tuple[Gain, ...]

    @property
    def others(self) -> float:
        """The greatest load by other programs."""
        return max((gain.others for gain in self.gains), default=0.0)

    def verdicts(self) -> list[str]:
        """Return the gain of every case in words."""
        lines = []
        for gain in self.gains:
            name, ratio = f"{gain.case}, {gain.recipe}", gain.ratio
            if ratio is None:
                reason = gain.before.reason or gain.after.reason
                lines.append(f"{name}: not measured: {reason}.")
            elif ratio.low <= 1 <= ratio.high:
                lines.append(f"{name}: no difference that the rounds can tell.")
            else:
                side = "faster" if ratio.value < 1 else "slower"
                lines.append(f"{name}: {abs(1 - ratio.value):.0%} {side} by this phase.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: all measurements, and the ratios."""
        return {
            "setting": asdict(self.setting),
            "rounds": self.rounds,
            "without": sorted(phase()),
            "gains": [
                {**asdict(gain), "ratio": None if gain.ratio is None else asdict(gain.ratio)}
                for gain in self.gains
            ],
        }


def phase() -> tuple[str, ...]:
    """Return the names of the rewrites that this phase is."""
    return tuple(sorted(rewrite_names() - FUSING - ATTENTION))


def run_phase_gain(options: GainOptions, console: Console | None = None) -> GainResults:
    """Measure, show a table, and write the requested files.

    Raises:
        OptionsError: A case, a recipe or a number does not exist.
    """
    console = console or Console()
    if options.rounds < LEAST_ROUNDS or options.threads < 0:
        raise OptionsError(
            f"{options.rounds} rounds with {options.threads} threads cannot be measured",
            fix=f"ask for {LEAST_ROUNDS} rounds or more, and 0 threads or more",
        )
    cases = [CASES[name] for name in pick(options.cases, CASES, "case")]
    recipes = pick(options.recipes or _USUAL_RECIPES, RECIPES, "recipe")
    threads = options.threads or torch.get_num_threads()
    setting = Setting.here(threads)
    gains: list[Gain] = []
    with watching(console, len(cases) * len(recipes) * (4 + options.rounds)) as watch:
        watch.say("building kernels and measuring speeds, once per machine")
        prepare_machine(threads)
        for case in cases:
            for recipe in recipes:
                gains.append(_measure(case, recipe, threads, options, watch))
                # Keep the results so far, even if the rest fails.
                _write(GainResults(setting, options.rounds, tuple(gains)), options)
    results = GainResults(setting, options.rounds, tuple(gains))
    console.print(_table(results))
    console.print(setting_text(setting, options.rounds, results.others))
    for line in results.verdicts():
        console.print(line, highlight=False)
    return results


def _measure(case: Case, recipe: str, threads: int, options: GainOptions, watch: Watch) -> Gain:
    float_model = Contender(
        engine=Engine.EAGER, float_type=FloatType.F32, model=case.model, sizes=case.sizes
    )
    eager = eager_model(case.model, case.sizes, RECIPES[recipe])
    before, after = (_contender(case, recipe, without) for without in (phase(), ()))
    inputs = example_inputs(case, case.seeds)
    with Comparison(inputs, float_model.name, threads, watch) as contest:
        contest.enter([float_model.competitor(timed=False)])
        contest.enter(
            [
                eager.competitor(timed=False),
                before.competitor(eager.name),
                after.competitor(eager.name),
            ]
        )
        background = BackgroundLoad()
        entries = contest.run(options.rounds, f"{case.name}, {recipe}", options.patience)
        others = background.share()
    return Gain(case.name, case.what, recipe, entries[before.name], entries[after.name], others)


def _contender(case: Case, recipe: str, without: tuple[str, ...]) -> Contender:
    return Contender(
        engine=Engine.QFUSE,
        float_type=FloatType.F32,
        model=case.model,
        sizes=case.sizes,
        recipe=RECIPES[recipe],
        without=without,
    )


def _write(results: GainResults, options: GainOptions) -> None:
    if options.json is not None:
        text = json.dumps(results.to_dict(), indent=1)
        options.json.write_text(text, encoding="utf-8")
    if options.page is not None:
        write_section(options.page, _SECTION, results=results)


def _table(results: GainResults) -> Table:
    table = Table(
        title="Llama without and with moving, combining and merging; medians in ms "
        "(10 % of the calls are below the figure in parentheses)",
        title_justify="left",
    )
    for column in ("case", "recipe"):
        table.add_column(column)
    for column in ("before", "after", "ratio", "dB"):
        table.add_column(column, justify="right", no_wrap=True)
    for gain in results.gains:
        table.add_row(
            gain.case,
            gain.recipe,
            time_text(gain.before),
            time_text(gain.after),
            ratio_text(gain.ratio),
            f"{words.decibels(gain.before.sqnr)} / {words.decibels(gain.after.sqnr)}",
        )
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(GainOptions)
def main(**given: Any) -> None:
    """Measure Llama before and after moving, combining and merging."""
    with exit_on_error(WorkerError):
        run_phase_gain(GainOptions(**given))


if __name__ == "__main__":
    main()
