"""Experiments that time a model before and after one change, in the same interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from qfuse.ir.errors import OptionsError
from qfuse_bench.harness.comparison import Comparison, Entry
from qfuse_bench.harness.machine import BackgroundLoad, Setting, prepare_machine
from qfuse_bench.harness.measure import LEAST_ROUNDS, compare
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.harness.stats import Ratio
from qfuse_bench.peers.cases import Case, example_inputs
from qfuse_bench.peers.contenders import Contender, Engine, FloatType, eager_model
from qfuse_bench.report import format as words
from qfuse_bench.report.outputs import Outputs
from qfuse_bench.report.tables import ratio_text, setting_text, time_text

PREFILL = Case("prefill", "llama", "4 layers, hidden 1024, 16 heads over 8, prompt of 256 tokens")
DECODE = Case("decode", "llama-decode", "the same, one token, key-value cache of 256", seeds=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to measure, and where to write the results.

    Attributes:
        rounds: Interleaved rounds per case and form.
        threads: OpenMP threads of every process; 0 takes torch's default.
        patience: Seconds to wait, per case and form, for other programs to leave the cores.
        json: Where to write everything that was measured.
        page: A page with a section to write the table into.
    """

    rounds: int = field(default=21, metadata={"help": "interleaved rounds per row of the table"})
    threads: int = field(default=0, metadata={"help": "threads; 0 takes torch's default"})
    patience: float = field(
        default=60.0,
        metadata={"help": "seconds to wait, per row, for other programs to be quiet"},
    )
    json: Path | None = field(
        default=None, metadata={"help": "write everything that was measured to a file"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """The contenders of one row.

    Attributes:
        before: Without the change.
        after: With it.
        recipe: The zoo's recipe; ``None`` for a float model.
    """

    before: Contender
    after: Contender
    recipe: str | None


@dataclass(frozen=True, slots=True)
class Experiment:
    """One change, and how to speak of it.

    Attributes:
        pair: Returns the contenders of a case and the name of a form.
        title: What the table compares.
        columns: Heads of the columns: form, before, after.
        cause: What a difference is due to, for verdicts.
        section: The section of a page that the table is written into.
        facts: Further facts for the JSON file.
        prepare: Whether to build the kernels and measure the machine first.
    """

    pair: Callable[[Case, str], Pair]
    title: str
    columns: tuple[str, str, str]
    cause: str
    section: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    prepare: bool = False


@dataclass(frozen=True, slots=True)
class Gain:
    """One model in one form.

    Attributes:
        case: Name of the model and its size.
        what: The size in words.
        form: Name of the form, such as a recipe.
        before: Without the change.
        after: With it.
        others: The fraction of the machine that other programs used meanwhile.
    """

    case: str
    what: str
    form: str
    before: Entry
    after: Entry
    others: float

    @property
    def ratio(self) -> Ratio | None:
        """Time after over time before; ``None`` unless both are valid."""
        if self.before.time is None or self.after.time is None:
            return None
        return compare(self.after.time, self.before.time)

    def verdict(self, cause: str) -> str:
        """Return what was gained in words, whatever it is."""
        name, ratio = f"{self.case}, {self.form}", self.ratio
        if ratio is None:
            return f"{name}: not measured: {self.before.reason or self.after.reason}."
        if ratio.low <= 1 <= ratio.high:
            return f"{name}: no difference that the rounds can tell."
        side = "faster" if ratio.value < 1 else "slower"
        return f"{name}: {abs(1 - ratio.value):.0%} {side} {cause}."


@dataclass(frozen=True, slots=True)
class GainResults:
    """A whole run."""

    experiment: Experiment
    setting: Setting
    rounds: int
    gains: tuple[Gain, ...]

    @property
    def others(self) -> float:
        """The greatest load by other programs."""
        return max((gain.others for gain in self.gains), default=0.0)

    def verdicts(self) -> list[str]:
        """Return the gain of every case in words."""
        return [gain.verdict(self.experiment.cause) for gain in self.gains]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: all measurements, and the ratios."""
        gains = [
            {**asdict(gain), "ratio": None if gain.ratio is None else asdict(gain.ratio)}
            for gain in self.gains
        ]
        head = {"setting": asdict(self.setting), "rounds": self.rounds}
        return {**head, **self.experiment.facts, "gains": gains}


def outputs_of(experiment: Experiment, options: RunOptions) -> Outputs:
    """Return where the results go.

    Raises:
        OptionsError: A file cannot be written.
    """
    return Outputs(experiment.section, options.page, options.json, "gain")


def run_experiment(
    experiment: Experiment,
    cases: Sequence[Case],
    forms: Sequence[str],
    options: RunOptions,
    console: Console | None = None,
) -> GainResults:
    """Measure every case in every form, show a table, and write the requested files.

    Raises:
        OptionsError: The number of rounds or threads is invalid.
    """
    console = console or Console()
    if options.rounds < LEAST_ROUNDS or options.threads < 0:
        raise OptionsError(
            f"{options.rounds} rounds with {options.threads} threads cannot be measured",
            fix=f"ask for {LEAST_ROUNDS} rounds or more, and 0 threads or more",
        )
    outputs = outputs_of(experiment, options)
    threads = options.threads or torch.get_num_threads()
    results = GainResults(experiment, Setting.here(threads), options.rounds, ())
    with watching(console, len(cases) * len(forms) * (4 + options.rounds)) as watch:
        if experiment.prepare:
            watch.say("building kernels and measuring speeds, once per machine")
            prepare_machine(threads)
        for case in cases:
            for form in forms:
                gain = _measure(experiment, case, form, threads, options, watch)
                results = replace(results, gains=(*results.gains, gain))
                # Keep the results so far, even if the rest fails.
                outputs.write(results.to_dict(), results=results)
    console.print(_table(results))
    console.print(setting_text(results.setting, options.rounds, results.others))
    for line in results.verdicts():
        console.print(line, highlight=False)
    return results


def _measure(
    experiment: Experiment, case: Case, form: str, threads: int, options: RunOptions, watch: Watch
) -> Gain:
    float_model = Contender(
        engine=Engine.EAGER, float_type=FloatType.F32, model=case.model, sizes=case.sizes
    )
    pair = experiment.pair(case, form)
    contenders = [pair.before.competitor(), pair.after.competitor()]
    if pair.recipe is not None:
        eager = eager_model(case.model, case.sizes, pair.recipe)
        like = [each.competitor(eager.name) for each in (pair.before, pair.after)]
        contenders = [eager.competitor(timed=False), *like]
    with Comparison(example_inputs(case, case.seeds), float_model.name, threads, watch) as contest:
        contest.enter([float_model.competitor(timed=False)])
        contest.enter(contenders)
        background = BackgroundLoad()
        entries = contest.run(options.rounds, f"{case.name}, {form}", options.patience)
        others = background.share()
    before, after = entries[pair.before.name], entries[pair.after.name]
    return Gain(case.name, case.what, form, before, after, others)


def _table(results: GainResults) -> Table:
    form, before, after = results.experiment.columns
    table = Table(
        title=f"{results.experiment.title}; medians in ms "
        "(10 % of the calls are below the figure in parentheses)",
        title_justify="left",
    )
    for column in ("case", form):
        table.add_column(column)
    for column in (before, after, "ratio", "dB"):
        table.add_column(column, justify="right", no_wrap=True)
    for gain in results.gains:
        table.add_row(
            gain.case,
            gain.form,
            time_text(gain.before),
            time_text(gain.after),
            ratio_text(gain.ratio),
            f"{words.decibels(gain.before.sqnr)} / {words.decibels(gain.after.sqnr)}",
        )
    return table
