"""``python -m qfuse_bench.experiments.throughput``: calls per second of n streams of m threads.

A stream is a thread of Python that calls the model in a loop. All streams share one compiled model.
Arrangements that use the same cores are compared in rounds that follow each other.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import qfuse
from qfuse import zoo
from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse.targets import Target
from qfuse.zoo import recipes
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.progress import watching
from qfuse_bench.harness.stats import median, quantile

_WARM_CALLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """What to measure.

    Attributes:
        model: A model of the zoo.
        recipe: How it is quantized.
        cores: How many cores to use; by default those that the process may use.
        rounds: How often each arrangement is measured.
        seconds: How long each measurement takes.
    """

    model: str = field(default="minilm", metadata={"help": "a model of the zoo"})
    recipe: str = field(default="w8a8-dynamic", metadata={"help": "how it is quantized"})
    cores: int | None = field(default=None, metadata={"help": "how many cores to use"})
    rounds: int = field(default=7, metadata={"help": "rounds per arrangement"})
    seconds: float = field(default=1.0, metadata={"help": "seconds per measurement"})


@dataclass(frozen=True, slots=True)
class Streams:
    """An arrangement of threads.

    Attributes:
        count: Threads of Python that call the model.
        threads: Threads that each call uses.
    """

    count: int
    threads: int

    def __str__(self) -> str:
        """Such as ``2x1``."""
        return f"{self.count}x{self.threads}"


@dataclass(slots=True)
class Throughput:
    """The figures of an arrangement.

    Attributes:
        streams: The arrangement.
        rates: Calls per second of all streams together, per round.
        latencies: Seconds of every call.
    """

    streams: Streams
    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


def arrangements(cores: int) -> list[Streams]:
    """Return every way to divide cores evenly among streams, the one with one stream first."""
    return [Streams(n, cores // n) for n in range(1, cores + 1) if cores % n == 0]


def measure_streams(
    model: qfuse.CompiledModel,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    streams: Streams,
    seconds: float,
) -> tuple[float, list[float]]:
    """Return the calls per second of all streams, and the seconds of every call."""
    args, kwargs = call
    limited = model.with_threads(streams.threads)
    ready = threading.Barrier(streams.count + 1)
    times: list[list[float]] = [[] for _ in range(streams.count)]
    ends = [0.0] * streams.count

    def work(index: int) -> None:
        for _ in range(_WARM_CALLS):
            limited(*args, **kwargs)
        ready.wait()
        begin = time.perf_counter()
        last, end = begin, begin + seconds
        while last < end:
            limited(*args, **kwargs)
            now = time.perf_counter()
            times[index].append(now - last)
            last = now
        ends[index] = last - begin

    workers = [threading.Thread(target=work, args=(i,)) for i in range(streams.count)]
    for worker in workers:
        worker.start()
    ready.wait()
    for worker in workers:
        worker.join()
    rate = sum(len(own) / took for own, took in zip(times, ends, strict=True))
    return rate, [value for own in times for value in own]


def run_throughput(options: ThroughputOptions, console: Console) -> list[Throughput]:
    """Measure every arrangement, and print a table."""
    if options.rounds < 1 or options.seconds <= 0:
        raise OptionsError(
            f"{options.rounds} rounds of {options.seconds} seconds cannot be measured",
            fix="ask for at least 1 round, and more than 0 seconds",
        )
    cores = options.cores or Target.detect(extensions=False).usable_cores
    figures = [Throughput(streams) for streams in arrangements(cores)]
    built = zoo.build(options.model)
    quantized = recipes.quantize(built.module, options.recipe, built.args, built.kwargs)
    with watching(console, options.rounds + 1) as watch:
        watch.say(f"compiling {options.model}, {options.recipe}")
        fast = qfuse.compile(quantized.model, built.args, built.kwargs)
        call = built.args, dict(built.kwargs)
        watch.advance()
        for number in range(options.rounds):
            watch.say(f"round {number + 1}")
            for figure in random.sample(figures, len(figures)):
                rate, latencies = measure_streams(fast, call, figure.streams, options.seconds)
                figure.rates.append(rate)
                figure.latencies += latencies
            watch.advance()
    console.print(_table(options, figures, cores))
    return figures


def _table(options: ThroughputOptions, figures: Sequence[Throughput], cores: int) -> Table:
    setting = Setting.here(cores)
    table = Table(
        title=f"{options.model}, {options.recipe}, on {cores} of {setting.cores} cores",
        title_justify="left",
    )
    table.add_column("streams x threads")
    for column in ("calls/s", "range", "of 1 stream", "latency ms", "p90"):
        table.add_column(column, justify="right")
    one = median(figures[0].rates)
    for figure in figures:
        rate = median(figure.rates)
        table.add_row(
            str(figure.streams),
            f"{rate:.1f}",
            f"{min(figure.rates):.1f} to {max(figure.rates):.1f}",
            f"{rate / one:.2f}",
            f"{median(figure.latencies) * 1e3:.2f}",
            f"{quantile(figure.latencies, 0.9) * 1e3:.2f}",
        )
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(ThroughputOptions)
def main(**given: Any) -> None:
    """Measure a model with its cores divided among streams."""
    with exit_on_error():
        run_throughput(ThroughputOptions(**given), Console())


if __name__ == "__main__":
    main()
