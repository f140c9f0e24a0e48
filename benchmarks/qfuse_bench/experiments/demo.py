"""``python -m qfuse_bench.experiments.demo``: a trained sentence encoder on real sentences.

The sentence encoder all-MiniLM-L6-v2, with trained weights, is quantized to int8 with torchao and
compiled with qfuse. The first figures are those of qfuse and the float model; ``torch.compile``
follows. ``--full`` adds bfloat16 and the quantized model without a compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError, QfuseError
from qfuse.report import Report
from qfuse.zoo import minilm, recipes
from qfuse_bench.harness.comparison import Comparison, Competitor, Entry, Verdict
from qfuse_bench.harness.machine import BackgroundLoad, Setting, prepare_machine
from qfuse_bench.harness.measure import LEAST_ROUNDS, Series, compare
from qfuse_bench.harness.process import WorkerError
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.harness.retrieval import Agreement, compare_embeddings
from qfuse_bench.harness.worker import Inputs
from qfuse_bench.peers.cases import GROUP_SIZES, RECIPES, pick
from qfuse_bench.peers.contenders import (
    Contender,
    Engine,
    FloatType,
    eager_model,
    float_peers,
    quantized_pair,
)
from qfuse_bench.report import format as words
from qfuse_bench.report.tables import ratio_text, setting_text, time_text

_LONGEST = 128  # tokens; no sentence of the library is longer
_FIRST_ROUNDS = 5  # for figures without an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo does.

    Attributes:
        recipe: How to quantize: a name of :data:`qfuse_bench.peers.cases.RECIPES`, or of the zoo.
        sentences: How many to encode.
        batch: Sentences per call.
        rounds: Interleaved rounds of timing.
        threads: OpenMP threads of every contender; 0 means torch's default.
        patience: Seconds to wait for other programs to be idle.
        full: Whether bfloat16 and the quantized model without a compiler take part.
    """

    recipe: str = field(
        default="dynamic",
        metadata={"help": f"how to quantize: {', '.join(RECIPES)}, or a zoo name"},
    )
    sentences: int = field(default=384, metadata={"help": "sentences to encode"})
    batch: int = field(default=32, metadata={"help": "sentences per call"})
    rounds: int = field(default=15, metadata={"help": "interleaved rounds of timing"})
    threads: int = field(
        default=0, metadata={"help": "threads of every contender; 0: torch's default"}
    )
    patience: float = field(
        default=10.0, metadata={"help": "seconds to wait for other programs to be quiet"}
    )
    full: bool = field(
        default=False, metadata={"help": "add bfloat16, and int8 without a compiler"}
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """The job of every contender: encode these batches; the first one is timed."""

    batches: list[Inputs]
    sizes: dict[str, int]
    recipe: str
    group_size: int | None
    threads: int
    rounds: int
    patience: float
    full: bool

    @property
    def kinds(self) -> tuple[FloatType, ...]:
        """What is not quantized is computed in these."""
        return tuple(FloatType) if self.full else (FloatType.F32,)

    @property
    def floats(self) -> list[Contender]:
        """The float model, the reference first."""
        peers = float_peers("minilm", self.sizes)
        return [peer for peer in peers if peer.float_type in self.kinds]

    @property
    def eager(self) -> Contender:
        """The quantized model without a compiler, for all sizes."""
        return eager_model(
            "minilm", self.sizes, self.recipe, dynamic=True, group_size=self.group_size
        )

    def pair(self, kind: FloatType) -> list[Contender]:
        """Torch's and our compiler on the quantized model; ours for all sizes."""
        return quantized_pair(
            "minilm", self.sizes, self.recipe, kind, dynamic=True, group_size=self.group_size
        )

    def ours(self, kind: FloatType) -> str:
        """Name of qfuse's entry at a float type."""
        return next(c.name for c in self.pair(kind) if c.engine is Engine.QFUSE)


@dataclass(frozen=True, slots=True)
class _Findings:
    entries: Mapping[str, Entry]
    agreements: Mapping[str, Agreement]
    report: Report | None
    others: float


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run the demo and print the results; return whether all times of qfuse are valid.

    Raises:
        QfuseError: The model or the sentences are missing, or an option is invalid.
    """
    job = _prepare(options)
    _introduce(job, options, console)
    with watching(console, _steps(job)) as watch:
        findings = _measure(job, watch, console)
    if findings.report is not None:
        console.print(Rule("what qfuse did, and why"))
        console.print(findings.report)
    console.print(Rule("what it brings"))
    console.print(_times(findings, job))
    console.print(_answers(findings))
    for line in _trouble(findings.entries):
        console.print(escape(line), style="red", highlight=False)
    console.print(setting_text(Setting.here(job.threads), job.rounds, findings.others))
    console.print(_summary(findings, job, options.sentences), highlight=False)
    return all(findings.entries[job.ours(kind)].verdict is Verdict.OK for kind in job.kinds)


def _prepare(options: DemoOptions) -> _Job:
    (name,) = pick((options.recipe,), dict.fromkeys((*RECIPES, *recipes.names())), "recipe")
    recipe, group_size = RECIPES.get(name, name), GROUP_SIZES.get(name)
    if options.rounds < LEAST_ROUNDS:
        raise OptionsError(
            f"{options.rounds} rounds are too few", fix=f"ask for {LEAST_ROUNDS} or more"
        )
    if not 1 <= options.batch <= options.sentences:
        raise OptionsError(
            f"no full batch of {options.batch} in {options.sentences} sentences",
            fix="ask for more sentences, or a smaller batch",
        )
    texts = minilm.sentences(options.sentences)
    batches: list[Inputs] = [
        ((), minilm.tokenize(texts[i : i + options.batch], _LONGEST))
        for i in range(0, len(texts), options.batch)
    ]
    batch, seq = batches[0][1]["input_ids"].shape
    threads = options.threads or torch.get_num_threads()
    sizes = {"batch": batch, "seq": seq}
    return _Job(
        batches,
        sizes,
        recipe,
        group_size,
        threads,
        options.rounds,
        options.patience,
        options.full,
    )


def _steps(job: _Job) -> int:
    return len(_first(job)) + len(_rest(job)) + _FIRST_ROUNDS + job.rounds


def _introduce(job: _Job, options: DemoOptions, console: Console) -> None:
    shapes = sorted({one[1]["input_ids"].shape[1] for one in job.batches})
    groups = f" in groups of {job.group_size}" if job.group_size else ""
    console.print(Rule("qfuse"))
    console.print(
        f"all-MiniLM-L6-v2 with its trained weights encodes {options.sentences} sentences of the "
        f"standard library's docstrings, in batches of {options.batch} padded to {shapes[0]} to "
        f"{shapes[-1]} tokens. Recipe {job.recipe}{groups}: {recipes.describe(job.recipe)}. "
        "qfuse compiles it once for all batch and sequence sizes; torch.compile freezes it for "
        f"the one size that is timed ({job.sizes['batch']} x {job.sizes['seq']}). "
        f"Each contender has a process of its own, with {job.threads} threads.",
        highlight=False,
    )


def _first(job: _Job) -> list[Competitor]:
    """Who gives the first figures: the float model, and qfuse."""
    ours = [c for c in job.pair(FloatType.F32) if c.engine is Engine.QFUSE]
    return [job.floats[0].competitor(), *(c.competitor() for c in ours)]


def _rest(job: _Job) -> list[Competitor]:
    """Who takes part in the rounds beside them."""
    known = {competitor.name for competitor in _first(job)}
    eager = job.eager
    like = eager.name if job.full else None
    rest = [peer.competitor() for peer in job.floats]
    rest += [c.competitor(like) for kind in job.kinds for c in job.pair(kind)]
    if job.full:
        rest.insert(0, eager.competitor(timed=False))
    return [competitor for competitor in rest if competitor.name not in known]


def _measure(job: _Job, watch: Watch, console: Console) -> _Findings:
    """Build all contenders, collect their answers, and time them.

    Raises:
        QfuseError: The float model does not run, so there is nothing to compare with.
    """
    watch.say("building kernels and measuring speeds, once per machine")
    prepare_machine(job.threads)
    first, reference = _first(job), job.floats[0].name
    with Comparison(job.batches[:1], reference, job.threads, watch) as contest:
        try:
            contest.enter(first)
            truth = _embeddings(contest, reference, job)
        except WorkerError as error:
            raise QfuseError(f"the float model does not run: {error}") from error
        early = contest.run(_FIRST_ROUNDS, "a batch, for the first figures")
        console.print(_first_figures(early, job), highlight=False)
        contest.enter(_rest(job))
        agreements = {}
        ours = [job.ours(kind) for kind in job.kinds]
        for name in (job.eager.name, *ours) if job.full else ours:
            watch.say(f"encoding all sentences with {name}")
            try:
                found = _embeddings(contest, name, job)
            except WorkerError:
                continue  # its entry has the reason
            agreements[name] = compare_embeddings(truth, found)
        reports = [w.state() for name in ours if (w := contest.worker(name)) is not None]
        background = BackgroundLoad()
        entries = contest.run(job.rounds, "a batch", job.patience)
        report = reports[0] if reports else None
        return _Findings(entries, agreements, report, background.share())


def _embeddings(contest: Comparison, name: str, job: _Job) -> torch.Tensor:
    """Encode all sentences."""
    worker = contest.worker(name)
    if worker is None:
        raise WorkerError(f"{name} is not there")
    return torch.cat([outputs[0] for outputs in worker.answers(job.batches)])


def _first_figures(entries: Mapping[str, Entry], job: _Job) -> str:
    """Say the times of the float model and of qfuse, as soon as both are known."""
    parts = [
        f"{_title(name)} {words.time(entry)} ms"
        for name, entry in entries.items()
        if entry.verdict is Verdict.OK
    ]
    built = entries[job.ours(FloatType.F32)].build_seconds
    seconds = "" if built is None else f" (compiled in {built:.0f} s)"
    return f"First figures: {', '.join(parts)}{seconds}."


def _times(findings: _Findings, job: _Job) -> Table:
    size = f"{job.sizes['batch']} sentences x {job.sizes['seq']} tokens"
    table = Table(
        title=f"One batch of {size}: medians of {job.rounds} rounds\n"
        "(in parentheses: 10 % of the calls are below)",
        title_justify="left",
    )
    table.add_column("model and what runs it")
    for column in ("ms", "qfuse / this", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, entry in findings.entries.items():
        if name == job.eager.name and entry.verdict is Verdict.OK:
            continue  # it only provides answers
        memory = entry.memory
        table.add_row(
            _title(name),
            time_text(entry),
            _against_qfuse(entry, findings.entries, job),
            words.megabytes(None if memory is None else memory.resident),
        )
    return table


def _against_qfuse(entry: Entry, entries: Mapping[str, Entry], job: _Job) -> Any:
    """Return qfuse's time over this one's, where float dtypes are equal."""
    kind = FloatType.BF16 if FloatType.BF16 in entry.name.split() else FloatType.F32
    ours = entries[job.ours(kind)]
    if ours is entry or ours.time is None or entry.time is None:
        return "-"
    return ratio_text(compare(ours.time, entry.time))


def _summary(findings: _Findings, job: _Job, sentences: int) -> str:
    """Return the outcome as one sentence, whichever way it went."""
    ours = findings.entries[job.ours(FloatType.F32)]
    if ours.time is None:
        return f"qfuse has no valid time here: {ours.verdict}, {ours.reason}."
    against = [
        _compared(ours.time, entry)
        for name, entry in findings.entries.items()
        if entry is not ours and entry.time is not None and FloatType.F32 in name.split()
    ]
    agreement = findings.agreements.get(ours.name)
    nearest = (
        ""
        if agreement is None
        else f", and {agreement.same_nearest:.0%} of {sentences} sentences keep their nearest one"
    )
    versus = f": {'; '.join(against)}" if against else ""
    return f"int8 MiniLM takes {1e3 * ours.time.median:.1f} ms under qfuse{versus}{nearest}."


def _compared(ours: Series, entry: Entry) -> str:
    assert entry.time is not None, "an entry without a time is not compared"
    factor = entry.time.median / ours.median
    phrase = (
        f"{factor:.2f} times as fast as" if factor >= 1 else f"{1 / factor:.2f} times the time of"
    )
    return f"{phrase} {_title(entry.name)} ({1e3 * entry.time.median:.1f} ms)"


def _title(name: str) -> str:
    titles = {
        Engine.EAGER: "eager",
        Engine.INDUCTOR: "torch.compile",
        Engine.QFUSE: "qfuse",
    }
    engine, kind, *recipe = name.split()
    model = "int8" if recipe else "float"
    peer = " + torchao" if recipe and engine == Engine.INDUCTOR else ""
    return f"{model} {kind}: {titles[Engine(engine)]}{peer}"


def _answers(findings: _Findings) -> Table:
    table = Table(title="The answers against the float model in f32", title_justify="left")
    table.add_column("int8 model under")
    for column in ("mean cosine", "least cosine", "same nearest"):
        table.add_column(column, justify="right")
    for name, agreement in findings.agreements.items():
        table.add_row(
            _title(name),
            f"{agreement.mean_cosine:.4f}",
            f"{agreement.least_cosine:.4f}",
            f"{agreement.same_nearest:.1%}",
        )
    return table


def _trouble(entries: Mapping[str, Entry]) -> list[str]:
    return [f"{_title(e.name)}: {e.verdict}, {e.reason}" for e in entries.values() if e.reason]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(DemoOptions)
def main(**given: Any) -> None:
    """Quantize and compile a real sentence encoder, and say what was done and what it brought."""
    with exit_on_error():
        worked = run_demo(DemoOptions(**given), Console())
    sys.exit(0 if worked else 1)


if __name__ == "__main__":
    main()
