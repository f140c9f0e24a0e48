"""``python -m qfuse_bench.kernels.scaling``: what more threads gain, for qfuse and for torch.

All numbers of threads and all contenders of a shape are timed in the same interleaved rounds. A
table per family shows how many times as fast qfuse is as on one thread, and its time over that of
each contender with as many threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from qfuse.targets import Target
from qfuse_bench.harness.machine import BackgroundLoad, Setting
from qfuse_bench.harness.machine_class import LIMITS, restart_with_limits
from qfuse_bench.harness.measure import LEAST_ROUNDS, Series, compare, measure
from qfuse_bench.harness.own_kernels import load_kernels
from qfuse_bench.harness.progress import watching
from qfuse_bench.harness.stats import Ratio
from qfuse_bench.kernels.cells import MOST_STREAMED_ROWS, Rotating
from qfuse_bench.kernels.contenders import OURS, Contender, Shape
from qfuse_bench.kernels.families import FAMILIES
from qfuse_bench.kernels.roofline import LEAST_CACHE_BYTES, copies_of
from qfuse_bench.kernels.run import number, size_of
from qfuse_bench.peers.cases import pick
from qfuse_bench.report import format as words
from qfuse_bench.report.outputs import Outputs
from qfuse_bench.report.tables import setting_text

_SECTION = "scaling"
_FAMILIES = ("w8a8", "w8a8-static", "w8a16", "w4a16-g32")
_ROWS, _SIZES = ("1", "16", "128", "512"), ("1024x1024", "4096x4096")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """What to measure.

    Attributes:
        family: Names out of the kernel benchmark's families.
        rows: Numbers of rows M.
        size: K x N.
        most_threads: The largest number of threads; 0 takes all usable cores.
        rounds: Interleaved rounds per shape.
        milliseconds: How long each contender runs in each round.
        isa: Hold qfuse and torch to this instruction set; "" for all that the machine has.
        json: Where to write everything that was measured.
        page: A page with a section to write the tables into.
    """

    family: tuple[str, ...] = field(
        default=_FAMILIES, metadata={"help": f"out of {', '.join(FAMILIES)}"}
    )
    rows: tuple[str, ...] = field(default=_ROWS, metadata={"help": "numbers of rows M"})
    size: tuple[str, ...] = field(default=_SIZES, metadata={"help": "K x N, as 1024x2816"})
    most_threads: int = field(
        default=0, metadata={"help": "the largest number of threads; 0 takes all usable cores"}
    )
    rounds: int = field(default=LEAST_ROUNDS, metadata={"help": "interleaved rounds per shape"})
    milliseconds: float = field(
        default=5.0, metadata={"help": "how long each contender runs in each round"}
    )
    isa: str = field(
        default="", metadata={"help": f"hold all to fewer instructions: {', '.join(LIMITS)}"}
    )
    json: Path | None = field(
        default=None, metadata={"help": "write everything that was measured to a file"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the tables into"}
    )


@dataclass(frozen=True, slots=True)
class Scaling:
    """The times of one shape.

    Attributes:
        family: Name of the family.
        shape: Sizes of the product.
        threads: The numbers of threads, one first.
        series: Times by number of threads and contender.
    """

    family: str
    shape: Shape
    threads: tuple[int, ...]
    series: Mapping[tuple[int, str], Series]

    @property
    def peers(self) -> tuple[str, ...]:
        """The contenders other than qfuse."""
        return tuple(dict.fromkeys(name for _, name in self.series if name != OURS))

    def speedup(self, threads: int, name: str = OURS) -> float:
        """Return how many times as fast as on one thread a contender is."""
        return self.series[1, name].median / self.series[threads, name].median

    def ratio(self, threads: int, peer: str) -> Ratio | None:
        """Return qfuse's time over a peer's with as many threads."""
        return compare(self.series[threads, OURS], self.series[threads, peer])

    def cells(self, threads: int) -> list[str]:
        """Return the cells of a row of a table."""
        ours = words.microseconds(self.series[threads, OURS].median)
        ratios = (words.ratio(self.ratio(threads, peer)) for peer in self.peers)
        return [str(self.shape), str(threads), ours, f"{self.speedup(threads):.2f}", *ratios]


@dataclass(frozen=True, slots=True)
class ScalingResults:
    """A whole run.

    Attributes:
        setting: Machine and software, with the largest number of threads.
        rounds: Interleaved rounds per shape.
        shapes: What was measured.
        others: The fraction of the machine that other programs used meanwhile.
    """

    setting: Setting
    rounds: int
    shapes: tuple[Scaling, ...]
    others: float

    def families(self) -> Iterator[tuple[str, str, list[Scaling]]]:
        """Yield name, title and shapes of every measured family."""
        for name in dict.fromkeys(found.family for found in self.shapes):
            yield name, FAMILIES[name].title, [s for s in self.shapes if s.family == name]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: all measurements."""
        return {
            "setting": asdict(self.setting),
            "rounds": self.rounds,
            "others": self.others,
            "shapes": [
                {
                    "family": found.family,
                    **asdict(found.shape),
                    "times": [
                        {"threads": threads, "contender": name, "seconds": series.rounds}
                        for (threads, name), series in found.series.items()
                    ],
                }
                for found in self.shapes
            ],
        }


@dataclass(frozen=True, slots=True)
class _WithThreads:
    """Calls a contender on so many threads."""

    calls: Rotating
    threads: int

    def time_block(self, calls: int) -> list[float]:
        torch.set_num_threads(self.threads)
        self.calls.time_block(1)  # starts or ends threads
        return self.calls.time_block(calls)


def numbers_of_threads(most: int) -> tuple[int, ...]:
    """Return the powers of two below ``most``, and ``most``."""
    powers = (1 << i for i in range(most.bit_length()))
    return tuple(sorted({*(p for p in powers if p < most), most}))


def run_scaling(options: ScalingOptions, console: Console | None = None) -> ScalingResults:
    """Measure, show tables, and write the requested files.

    Raises:
        OptionsError: A family or a number does not exist, or there are no kernels.
    """
    console = console or Console()
    target = Target.detect(extensions=False)
    most = options.most_threads or target.usable_cores
    if options.rounds < LEAST_ROUNDS or most < 1:
        raise OptionsError(
            f"{options.rounds} rounds with up to {most} threads cannot be measured",
            fix=f"ask for {LEAST_ROUNDS} rounds or more, and 0 threads or more",
        )
    families = pick(options.family, FAMILIES, "family")
    shapes = [(size_of(size), [number(m) for m in options.rows]) for size in options.size]
    outputs = Outputs(_SECTION, options.page, options.json)
    load_kernels()
    threads = numbers_of_threads(most)
    background, found = BackgroundLoad(), list[Scaling]()
    cache_bytes = max(target.l3_bytes, LEAST_CACHE_BYTES)
    before = torch.get_num_threads()
    try:
        with watching(console, len(families) * sum(len(rows) for _, rows in shapes)) as watch:
            for name in families:
                for (k, n), rows in shapes:
                    watch.say(f"{name}: making weights of {k} x {n}")
                    prepared = FAMILIES[name].prepare(k, n, lambda b: copies_of(b, cache_bytes))
                    for m in rows:
                        watch.say(f"{name}: {m} x {k} x {n}")
                        shape = Shape(m, k, n)
                        found.append(_measure(name, shape, prepared(m), threads, options))
                        watch.advance()
    finally:
        torch.set_num_threads(before)
    setting = Setting.here(most)
    results = ScalingResults(setting, options.rounds, tuple(found), background.share())
    _show(results, console)
    outputs.write(results.to_dict(), results=results)
    return results


def _measure(
    name: str,
    shape: Shape,
    contenders: Mapping[str, Contender],
    threads: tuple[int, ...],
    options: ScalingOptions,
) -> Scaling:
    # Few rows are bound by reading the weight: from memory, as in a model of many layers.
    cold = shape.m <= MOST_STREAMED_ROWS
    timed = {
        (t, contender): _WithThreads(Rotating(found, cold), t)
        for t in threads
        for contender, found in contenders.items()
    }
    keys = {f"{t} {contender}": (t, contender) for t, contender in timed}
    for key in timed.values():
        key.time_block(1)  # generates code, allocates
    series = measure(
        {text: timed[key] for text, key in keys.items()},
        options.rounds,
        block_seconds=options.milliseconds / 1000,
        least_calls=1,
    )
    return Scaling(name, shape, threads, {keys[text]: found for text, found in series.items()})


def _show(results: ScalingResults, console: Console) -> None:
    for name, title, shapes in results.families():
        table = Table(title=f"{name}: {title}", title_justify="left")
        for column in ("M x K x N", "threads", "us", "of 1 thread"):
            table.add_column(column, justify="right", no_wrap=True)
        for peer in shapes[0].peers:
            table.add_column(f"/ {peer}", justify="right", no_wrap=True)
        for shape in shapes:
            for threads in shape.threads:
                table.add_row(*shape.cells(threads), end_section=threads == shape.threads[-1])
        console.print(table)
    console.print(setting_text(results.setting, results.rounds, results.others))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(ScalingOptions)
def main(**given: Any) -> None:
    """Measure what more threads gain."""
    with exit_on_error():
        options = ScalingOptions(**given)
        restart_with_limits(options.isa)
        run_scaling(options)


if __name__ == "__main__":
    main()
