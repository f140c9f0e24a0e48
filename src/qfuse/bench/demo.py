"""``python -m qfuse.bench.demo``: the main job, on a real model with real sentences.

The sentence encoder all-MiniLM-L6-v2, with trained weights, is quantized to int8 with torchao and
compiled with qfuse. Shown is what was fused, what was left and why, what a batch costs against
the peers, what it takes in memory, and what quantizing did to the answers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

from qfuse.bench import words
from qfuse.bench.command import options_of
from qfuse.bench.contest import Contest, Entry, Verdict
from qfuse.bench.machine import Bystanders, Setting
from qfuse.bench.measure import LEAST_ROUNDS, compare
from qfuse.bench.models import RECIPES
from qfuse.bench.peers import FACTORY, Contender, Engine, FloatType, float_peers, quantized_pair
from qfuse.bench.process import WorkerError
from qfuse.bench.progress import watching
from qfuse.bench.retrieval import Agreement, compare_embeddings
from qfuse.bench.tables import ratio_text, setting_text, time_text
from qfuse.ir.errors import OptionsError, QfuseError
from qfuse.zoo import minilm, recipes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qfuse.bench.progress import Watch
    from qfuse.bench.worker import Inputs
    from qfuse.report import Report

__all__ = ["DemoOptions", "main", "run_demo"]

_LONGEST = 128  # tokens; no sentence of the library is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo does.

    Attributes:
        recipe: How to quantize: a name of :data:`qfuse.bench.models.RECIPES`, or of the zoo.
        sentences: How many to encode.
        batch: Sentences per call.
        rounds: Interleaved rounds of timing.
        threads: OpenMP threads of everybody; 0 takes torch's default.
        patience: Seconds to wait for other programs to be quiet.
    """

    recipe: str = field(
        default="dynamic",
        metadata={"help": f"how to quantize: {', '.join(RECIPES)}, or a zoo name"},
    )
    sentences: int = field(default=384, metadata={"help": "sentences to encode"})
    batch: int = field(default=32, metadata={"help": "sentences per call"})
    rounds: int = field(default=15, metadata={"help": "interleaved rounds of timing"})
    threads: int = field(default=0, metadata={"help": "threads of everybody; 0: torch's default"})
    patience: float = field(
        default=20.0, metadata={"help": "seconds to wait for other programs to be quiet"}
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """What everybody does: encode these batches; the first one is what is timed."""

    batches: list[Inputs]
    sizes: dict[str, int]
    recipe: str
    threads: int
    rounds: int
    patience: float

    def contender(self, engine: Engine, float_type: FloatType) -> Contender:
        """Return who runs the quantized model at every batch and sequence size."""
        return Contender(
            engine=engine,
            float_type=float_type,
            model="minilm",
            sizes=self.sizes,
            recipe=self.recipe,
            dynamic=True,
        )


@dataclass(frozen=True, slots=True)
class _Findings:
    entries: Mapping[str, Entry]
    agreements: Mapping[str, Agreement]
    report: Report | None
    others: float


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run the demo and print what was found; return whether qfuse did its job.

    Raises:
        QfuseError: The model, the sentences or an option are not there.
    """
    job = _prepare(options)
    _introduce(job, options, console)
    with watching(console, _steps(job)) as watch:
        findings = _measure(job, watch)
    if findings.report is not None:
        console.print(Rule("what qfuse did, and why"))
        console.print(findings.report)
    console.print(Rule("what it brings"))
    console.print(_times(findings, job))
    console.print(_answers(findings))
    for line in _trouble(findings.entries):
        console.print(escape(line), style="red", highlight=False)
    setting = Setting.here(job.threads)
    console.print(setting_text(setting, job.rounds, findings.others))
    ours = [findings.entries[job.contender(Engine.QFUSE, kind).name] for kind in FloatType]
    return all(entry.verdict is Verdict.OK for entry in ours)


def _prepare(options: DemoOptions) -> _Job:
    recipe = RECIPES.get(options.recipe, options.recipe)
    recipes.describe(recipe)  # raises for one that does not exist
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
    return _Job(batches, sizes, recipe, threads, options.rounds, options.patience)


def _steps(job: _Job) -> int:
    return 3 + 2 * len(FloatType) + job.rounds + 2


def _introduce(job: _Job, options: DemoOptions, console: Console) -> None:
    shapes = sorted({one[1]["input_ids"].shape[1] for one in job.batches})
    console.print(Rule("qfuse"))
    console.print(
        f"all-MiniLM-L6-v2 with its trained weights encodes {options.sentences} sentences of the "
        f"standard library's docstrings,\nin batches of {options.batch} padded to {shapes[0]} to "
        f"{shapes[-1]} tokens. Recipe {job.recipe}: {recipes.describe(job.recipe)}.\n"
        f"qfuse compiles it once for all batch and sequence sizes; torch.compile gets the one size "
        f"that is timed ({job.sizes['batch']} x {job.sizes['seq']}).\nEverybody runs in a process "
        f"of its own, with {job.threads} threads.",
        highlight=False,
    )


def _measure(job: _Job, watch: Watch) -> _Findings:
    """Build everybody, collect the answers, and time.

    Raises:
        QfuseError: The float model does not run, so there is nothing to compare with.
    """
    with Contest(job.batches[:1], job.threads, watch) as contest:
        floats = float_peers("minilm", job.sizes)
        pairs = [p for kind in FloatType for p in _pair(job, kind)]
        for contender in floats:
            contest.enter(contender.name, FACTORY, contender.to_dict())
        try:
            contest.refer_to(floats[0].name)
            reference = _embeddings(contest, floats[0].name, job)
        except WorkerError as error:
            raise QfuseError(f"the float model does not run: {error}") from error
        own = _eager_embeddings(contest, job, watch)
        for contender in pairs:
            contest.enter(contender.name, FACTORY, contender.to_dict())
        agreements = {} if own is None else {own[0]: compare_embeddings(reference, own[1])}
        report = None
        for contender in pairs:
            if contender.engine is Engine.QFUSE and contest.worker(contender.name) is not None:
                watch.say(f"encoding with {contender.name}")
                found = _try_embeddings(contest, contender.name, job)
                if found is not None:
                    agreements[contender.name] = compare_embeddings(reference, found)
                report = report or _report(contest, contender.name)
        bystanders = Bystanders()
        entries = contest.run(job.rounds, "a batch", job.patience)
        return _Findings(entries, agreements, report, bystanders.share())


def _pair(job: _Job, kind: FloatType) -> list[Contender]:
    return quantized_pair("minilm", job.sizes, job.recipe, kind, dynamic=True)


def _embeddings(contest: Contest, name: str, job: _Job) -> torch.Tensor:
    """Encode all sentences."""
    worker = contest.worker(name)
    if worker is None:
        raise WorkerError(f"{name} is not there")
    return _joined(worker.answers(job.batches))


def _try_embeddings(contest: Contest, name: str, job: _Job) -> torch.Tensor | None:
    try:
        return _embeddings(contest, name, job)
    except WorkerError:
        # The rounds come upon it too, and say why.
        return None


def _eager_embeddings(contest: Contest, job: _Job, watch: Watch) -> tuple[str, torch.Tensor] | None:
    """Encode all sentences with the quantized model as torchao leaves it."""
    contender = job.contender(Engine.EAGER, FloatType.F32)
    watch.say(f"encoding with {contender.name}")
    try:
        answers = contest.answers(FACTORY, contender.to_dict(), job.batches)
    except WorkerError:
        # The contenders fail on it too, and say why.
        return None
    return contender.name, _joined(answers)


def _joined(answers: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    return torch.cat([outputs[0] for outputs in answers])


def _report(contest: Contest, name: str) -> Report | None:
    worker = contest.worker(name)
    report: Report | None = None if worker is None else worker.state()
    return report


def _times(findings: _Findings, job: _Job) -> Table:
    size = f"{job.sizes['batch']} sentences x {job.sizes['seq']} tokens"
    table = Table(
        title=f"One batch of {size}: median of {job.rounds} rounds "
        "(10 % of the calls are below the figure in parentheses)",
        title_justify="left",
    )
    table.add_column("model and what runs it")
    for column in ("ms", "qfuse takes, at equal dtype", "MB after", "MB peak", "MB building"):
        table.add_column(column, justify="right", no_wrap=column != "qfuse takes, at equal dtype")
    for name, entry in findings.entries.items():
        memory = entry.memory
        table.add_row(
            _title(name),
            time_text(entry),
            _against_qfuse(entry, findings.entries, job),
            words.megabytes(None if memory is None else memory.resident),
            words.megabytes(None if memory is None else memory.peak),
            words.megabytes(entry.build_peak),
        )
    return table


def _against_qfuse(entry: Entry, entries: Mapping[str, Entry], job: _Job) -> Any:
    """Return qfuse's time over this one's, where float dtypes are equal."""
    kind = FloatType.BF16 if FloatType.BF16 in entry.name.split() else FloatType.F32
    ours = entries[job.contender(Engine.QFUSE, kind).name]
    if ours is entry or ours.time is None or entry.time is None:
        return "-"
    return ratio_text(compare(ours.time, entry.time))


def _title(name: str) -> str:
    titles = {
        Engine.EAGER: "eager",
        Engine.INDUCTOR: "torch.compile, frozen",
        Engine.QFUSE: "qfuse",
    }
    engine, kind, *recipe = name.split()
    model = "int8" if recipe else "float"
    peer = " + torchao" if recipe and engine == Engine.INDUCTOR else ""
    return f"{model} {kind}: {titles[Engine(engine)]}{peer}"


def _answers(findings: _Findings) -> Table:
    table = Table(title="The answers against the float model in f32", title_justify="left")
    table.add_column("int8 model under")
    for column in ("mean cosine", "least cosine", "same nearest sentence"):
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
    try:
        worked = run_demo(DemoOptions(**given), Console())
    except QfuseError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)
    sys.exit(0 if worked else 1)


if __name__ == "__main__":
    main()
