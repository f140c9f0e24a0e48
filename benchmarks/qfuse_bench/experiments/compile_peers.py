"""``python -m qfuse_bench.experiments.compile_peers``: compile times beside ``torch.compile``.

Each compilation is a process of its own with an empty cache of compiled code, which has compiled
one small linear before, so that neither imports nor precompiled headers count. The contenders take
turns. The time of ``torch.compile`` is that of its first call, which compiles.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import qfuse
from qfuse import zoo
from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import BackendError, OptionsError
from qfuse.zoo import recipes
from qfuse_bench.harness import _torch_api
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.process import Job, Worker, WorkerError
from qfuse_bench.harness.progress import watching
from qfuse_bench.harness.stats import median
from qfuse_bench.harness.worker import Inputs, Subject
from qfuse_bench.report.outputs import Outputs

QFUSE, PLAIN, FROZEN = "qfuse", "torch.compile", "torch.compile, frozen"
CONTENDERS = (QFUSE, PLAIN, FROZEN)
MODELS: Mapping[str, tuple[str, dict[str, int]]] = MappingProxyType(
    {
        "minilm": ("minilm", {}),
        "bert": ("bert", {"layers": 4}),
        "llama": ("llama", {"layers": 4}),
        "llama-32": ("llama", {"layers": 32}),
    }
)
_USUAL = ("minilm", "bert", "llama")
_QUICK_SIZES = MappingProxyType({"layers": 2, "hidden": 256, "heads": 8, "intermediate": 512})
_SECTION = "compile-peers"
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_STEPS = ("capture", "plan", "compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """What to compile, and how often.

    Attributes:
        rounds: How often each contender compiles each model.
        models: Names out of :data:`MODELS`.
        recipe: The recipe that all of them are quantized with.
        threads: OpenMP threads; 0 is one per usable core.
        quick: Two narrow layers of the models whose size can be chosen, by two contenders, once.
        page: A page with a section to write the table into.
    """

    rounds: int = field(default=3, metadata={"help": "rounds per model"})
    models: tuple[str, ...] = field(default=_USUAL, metadata={"help": "a model to compile"})
    recipe: str = field(default="w8a8-dynamic", metadata={"help": "quantize with this recipe"})
    threads: int = field(default=0, metadata={"help": "OpenMP threads; 0 is one per core"})
    quick: bool = field(
        default=False, metadata={"help": "two narrow layers per model, two contenders, once"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        unknown = [name for name in self.models if name not in MODELS]
        if unknown:
            raise OptionsError(
                f"{unknown[0]!r} is not a model of this table", fix=f"one of {', '.join(MODELS)}"
            )
        if self.rounds < 1 or self.threads < 0:
            raise OptionsError("nothing can be measured", fix="ask for at least one round")
        if self.quick and not any(MODELS[name][1] for name in self.models):
            raise OptionsError("--quick needs a model of another size", fix="name bert or llama")


@dataclass(frozen=True, slots=True)
class PeerRow:
    """What one contender needs for one model.

    Attributes:
        model: The name of the model.
        contender: Out of :data:`CONTENDERS`.
        seconds: The whole time, per round.
        cpu: CPU seconds with those of the C++ compiler, per round.
        steps: Medians of capture, plan and compile; empty for ``torch.compile``.
        versus: The median as a multiple of that of ``torch.compile``.
    """

    model: str
    contender: str
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]
    steps: tuple[float, ...] = ()
    versus: float = 1.0


def build(arguments: Mapping[str, Any], example: Inputs) -> Subject:
    """Compile a model in a worker and return it with the seconds as facts.

    Args:
        arguments: ``model``, ``sizes``, ``recipe`` and ``contender``.
        example: The inputs to compile for.
    """
    args, kwargs = example
    _torch_api.register_peer_patterns()
    built = zoo.build(arguments["model"], **arguments["sizes"])
    model = recipes.quantize(built.module, arguments["recipe"], args, kwargs).model
    contender = arguments["contender"]
    folder = tempfile.TemporaryDirectory(prefix="qfuse-bench-")
    os.environ[_CACHE_VARIABLE] = folder.name
    _compiled(contender, nn.Linear(8, 8).eval(), ((torch.ones(2, 8),), {}))
    begin, cpu = time.perf_counter(), _cpu_seconds()
    call, steps = _compiled(contender, model, (args, kwargs))
    facts = {
        "seconds": time.perf_counter() - begin,
        "cpu": _cpu_seconds() - cpu,
        "steps": steps,
    }
    # The folder lives as long as what was compiled into it.
    return Subject(call, facts=facts, state=folder)


def _compiled(
    contender: str, model: nn.Module, example: Inputs
) -> tuple[Callable[..., Any], list[float]]:
    args, kwargs = example
    if contender == QFUSE:
        fast = qfuse.compile(model, args, kwargs, options={"cache": False})
        facts = fast.report.facts
        return fast, [getattr(facts, f"{step}_seconds") for step in _STEPS]
    frozen = contender == FROZEN
    call = _torch_api.compile_frozen(model) if frozen else torch.compile(model, dynamic=False)
    call(*args, **kwargs)
    return call, []


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of the compilers that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def run_compile_peers(options: PeerOptions, console: Console) -> list[PeerRow]:
    """Measure, show a table, and write the requested page."""
    outputs = Outputs(_SECTION, options.page)
    setting = Setting.here(options.threads or torch.get_num_threads())
    rounds = 1 if options.quick else options.rounds
    contenders = (QFUSE, PLAIN) if options.quick else CONTENDERS
    models = [name for name in options.models if MODELS[name][1] or not options.quick]
    rows: list[PeerRow] = []
    with watching(console, len(models) * rounds * len(contenders)) as watch:
        for name in models:
            family, sizes = MODELS[name]
            sizes = {**sizes, **_QUICK_SIZES} if options.quick else sizes
            built = zoo.build(family, **sizes)
            example = (built.args, built.kwargs)
            found: dict[str, list[dict[str, Any]]] = {one: [] for one in contenders}
            for number in range(rounds):
                for contender in contenders:
                    watch.say(f"{name} by {contender}, round {number + 1}")
                    job = Job(
                        "qfuse_bench.experiments.compile_peers:build",
                        {
                            "model": family,
                            "sizes": sizes,
                            "recipe": options.recipe,
                            "contender": contender,
                        },
                        setting.threads,
                    )
                    found[contender].append(_facts(job, example))
                    watch.advance()
            rows += rows_of(name, found)
            outputs.write(rows=rows, setting=setting, verdicts=verdicts(rows), median=median)
    console.print(_table(rows))
    for line in verdicts(rows):
        console.print(line, highlight=False)
    return rows


def _facts(job: Job, example: Inputs) -> dict[str, Any]:
    try:
        with Worker(job, example) as worker:
            return worker.facts
    except WorkerError as error:
        raise BackendError(
            f"{job.arguments['contender']} does not compile {job.arguments['model']}: {error}",
            fix="name the other models with --models; what was measured before is in the page",
        ) from error


def rows_of(model: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[PeerRow]:
    """Return a row per contender from the facts of its rounds."""
    rival = median([facts["seconds"] for facts in found[PLAIN]])
    rows = []
    for contender, facts in found.items():
        seconds = tuple(float(one["seconds"]) for one in facts)
        cpu = tuple(float(one["cpu"]) for one in facts)
        steps = tuple(median(each) for each in zip(*(one["steps"] for one in facts), strict=True))
        rows.append(PeerRow(model, contender, seconds, cpu, steps, median(seconds) / rival))
    return rows


def verdicts(rows: Sequence[PeerRow]) -> list[str]:
    """Say for which models qfuse compiles at least as fast as ``torch.compile``."""
    return [
        f"{row.model}: qfuse takes {row.versus:.2f} of the time of torch.compile; the aim is at "
        "most 1."
        for row in rows
        if row.contender == QFUSE
    ]


def _table(rows: Sequence[PeerRow]) -> Table:
    table = Table(title="Compiling, seconds", title_justify="left")
    for column in ("model", "compiler"):
        table.add_column(column)
    for column in ("seconds", "of torch.compile", "CPU seconds", *_STEPS):
        table.add_column(column, justify="right")
    for row in rows:
        steps = [f"{seconds:.1f}" for seconds in row.steps] or [""] * len(_STEPS)
        times = (f"{median(row.seconds):.1f}", f"{row.versus:.2f}", f"{median(row.cpu):.1f}")
        table.add_row(row.model, row.contender, *times, *steps)
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(PeerOptions)
def main(**given: Any) -> None:
    """Measure how long qfuse and torch.compile take to compile the same models."""
    with exit_on_error():
        run_compile_peers(PeerOptions(**given), Console())


if __name__ == "__main__":
    main()
