"""``python -m qfuse_bench.experiments.inductor_merge``: merging linears inside Inductor.

Two processes hold the same model under the same frozen ``torch.compile``, one of them with
:func:`qfuse.inductor_options`. They are timed in the same interleaved rounds.
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
from qfuse_bench.experiments.ablation import Gain
from qfuse_bench.harness.comparison import Comparison
from qfuse_bench.harness.machine import BackgroundLoad, Setting
from qfuse_bench.harness.measure import LEAST_ROUNDS
from qfuse_bench.harness.process import WorkerError
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.peers.cases import Case, example_inputs, pick
from qfuse_bench.peers.contenders import Contender, Engine, FloatType, eager_model
from qfuse_bench.report import format as words
from qfuse_bench.report.markdown import write_section
from qfuse_bench.report.tables import ratio_text, setting_text, time_text

CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("prefill", "llama", "4 layers, hidden 1024, 16 heads over 8, prompt of 256 tokens"),
        Case("decode", "llama-decode", "the same, one token, key-value cache of 256", seeds=(0,)),
        Case("minilm", "minilm", "6 layers, 16 sentences x 64 tokens", {"batch": 16}),
    )
}
"""By name."""

FORMS: Mapping[str, tuple[str | None, FloatType]] = {
    "dynamic": ("w8a8-dynamic", FloatType.F32),
    "static": ("w8a8-static", FloatType.F32),
    "weight-only 4 bits": ("w4a16", FloatType.BF16),
    "float": (None, FloatType.BF16),
}
"""What the linears are made of: the zoo's recipe, and what is not quantized is computed in."""

_SECTION = "concat-gain"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatOptions:
    """What to measure.

    Attributes:
        cases: Names out of :data:`CASES`; none is all.
        forms: Names out of :data:`FORMS`; none is all.
        rounds: Interleaved rounds per case and form.
        threads: OpenMP threads of every process; 0 takes torch's default.
        patience: Seconds to wait, per case and form, for other programs to leave the cores.
        json: Where to write everything that was measured.
        page: A page with a section to write the table into.
    """

    cases: tuple[str, ...] = field(
        default=(), metadata={"help": f"what to measure, out of {', '.join(CASES)} [all]"}
    )
    forms: tuple[str, ...] = field(
        default=(), metadata={"help": f"kinds of linears, out of {', '.join(FORMS)} [all]"}
    )
    rounds: int = field(default=21, metadata={"help": "interleaved rounds per case and form"})
    threads: int = field(default=0, metadata={"help": "threads; 0 takes torch's default"})
    patience: float = field(
        default=60.0,
        metadata={"help": "seconds to wait, per case and form, for other programs to be quiet"},
    )
    json: Path | None = field(
        default=None, metadata={"help": "write everything that was measured to a file"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )


@dataclass(frozen=True, slots=True)
class ConcatResults:
    """A whole run."""

    setting: Setting
    rounds: int
    gains: tuple[Gain, ...]

    @property
    def others(self) -> float:
        """How busy the machine was with other things, at worst."""
        return max((gain.others for gain in self.gains), default=0.0)

    def verdicts(self) -> list[str]:
        """Say what was gained, whatever it is."""
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
                lines.append(f"{name}: {abs(1 - ratio.value):.0%} {side} with merged linears.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: everything that was measured, and the ratios."""
        gains = [
            {**asdict(gain), "ratio": None if gain.ratio is None else asdict(gain.ratio)}
            for gain in self.gains
        ]
        return {"setting": asdict(self.setting), "rounds": self.rounds, "gains": gains}


def run_concat_gain(options: ConcatOptions, console: Console | None = None) -> ConcatResults:
    """Measure, show a table, and write what was asked for.

    Raises:
        OptionsError: A case, a form or a number does not exist.
    """
    console = console or Console()
    if options.rounds < LEAST_ROUNDS or options.threads < 0:
        raise OptionsError(
            f"{options.rounds} rounds with {options.threads} threads cannot be measured",
            fix=f"ask for {LEAST_ROUNDS} rounds or more, and 0 threads or more",
        )
    cases = [CASES[name] for name in pick(options.cases, CASES, "case")]
    forms = pick(options.forms, FORMS, "form")
    threads = options.threads or torch.get_num_threads()
    setting = Setting.here(threads)
    gains: list[Gain] = []
    with watching(console, len(cases) * len(forms) * (4 + options.rounds)) as watch:
        for case in cases:
            for form in forms:
                gains.append(_measure(case, form, threads, options, watch))
                # What is measured is kept, whatever happens to the rest.
                _write(ConcatResults(setting, options.rounds, tuple(gains)), options)
    results = ConcatResults(setting, options.rounds, tuple(gains))
    console.print(_table(results))
    console.print(setting_text(setting, options.rounds, results.others))
    for line in results.verdicts():
        console.print(line, highlight=False)
    return results


def _measure(case: Case, form: str, threads: int, options: ConcatOptions, watch: Watch) -> Gain:
    recipe, float_type = FORMS[form]
    float_model = Contender(
        engine=Engine.EAGER, float_type=FloatType.F32, model=case.model, sizes=case.sizes
    )
    before, after = (
        Contender(
            engine=engine,
            float_type=float_type,
            model=case.model,
            sizes=case.sizes,
            recipe=recipe,
        )
        for engine in (Engine.INDUCTOR, Engine.INDUCTOR_QFUSE)
    )
    eager = float_model if recipe is None else eager_model(case.model, case.sizes, recipe)
    like = None if recipe is None else eager.name
    with Comparison(example_inputs(case, case.seeds), float_model.name, threads, watch) as contest:
        contest.enter([float_model.competitor(timed=False)])
        quantized = [] if recipe is None else [eager.competitor(timed=False)]
        contest.enter([*quantized, before.competitor(like), after.competitor(like)])
        background = BackgroundLoad()
        entries = contest.run(options.rounds, f"{case.name}, {form}", options.patience)
        others = background.share()
    return Gain(case.name, case.what, form, entries[before.name], entries[after.name], others)


def _write(results: ConcatResults, options: ConcatOptions) -> None:
    if options.json is not None:
        text = json.dumps(results.to_dict(), indent=1)
        options.json.write_text(text, encoding="utf-8")
    if options.page is not None:
        write_section(options.page, _SECTION, results=results)


def _table(results: ConcatResults) -> Table:
    table = Table(
        title="torch.compile, frozen, without and with merged linears; medians in ms "
        "(10 % of the calls are below the figure in parentheses)",
        title_justify="left",
    )
    for column in ("case", "linears"):
        table.add_column(column)
    for column in ("apart", "merged", "ratio", "dB"):
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
@options_of(ConcatOptions)
def main(**given: Any) -> None:
    """Measure what merging linears inside torch.compile gains."""
    with exit_on_error(WorkerError):
        run_concat_gain(ConcatOptions(**given))


if __name__ == "__main__":
    main()
