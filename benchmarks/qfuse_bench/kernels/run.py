"""``python -m qfuse_bench.kernels.run``: kernels against ops of torch that compute the same.

Every cell of the grid is one shape with cold or with warm weights; its contenders are timed in the
same interleaved rounds. Cold ones rotate copies of their weight that are twice as large together as
the last-level cache. Beside each time stands what part it is of what the machine could do, and
below the tables whether the kernels reach what they aim at.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse.kernels.library import ISA_VARIABLE
from qfuse.targets import Target
from qfuse_bench.harness.machine import BackgroundLoad, Setting
from qfuse_bench.harness.machine_class import LIMITS, restart_with_limits
from qfuse_bench.harness.measure import LEAST_ROUNDS
from qfuse_bench.harness.own_kernels import load_kernels
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.kernels.cells import Cell, Plan, Stillness, cold_and_warm
from qfuse_bench.kernels.contenders import Shape
from qfuse_bench.kernels.families import FAMILIES
from qfuse_bench.kernels.results import KernelResults
from qfuse_bench.kernels.roofline import Limits, measure_limits
from qfuse_bench.kernels.tables import limits_text, show_kernels
from qfuse_bench.kernels.targets import ROWS, SIDES, TARGETS
from qfuse_bench.peers.cases import pick
from qfuse_bench.report.outputs import Outputs

_SECTION = "kernels"
_QUICK_ROWS = (1, 32, 512)
_QUICK_SIZES = ((1024, 2816), (4096, 4096))
_AIMED = tuple(dict.fromkeys(t.family for t in TARGETS if t.family in FAMILIES))
# What a contender takes longer than the machine's limit, about, and what making its weights does.
_SLOWER = 1.5
_SECONDS_PER_WEIGHT = 30e-9
_COPIED_BYTES_PER_SECOND = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """What to measure.

    Attributes:
        family: Names out of the families; none is all that have targets.
        rows: Numbers of rows M; none is all of the grid.
        size: K x N; none is all of the grid.
        rounds: Interleaved rounds per cell.
        quick: Take a part of the grid.
        milliseconds: How long each contender runs in each round.
        threads: OpenMP threads; 0 takes torch's default.
        isa: Hold qfuse and torch to this instruction set; "" for all that the machine has.
        patience: Seconds to wait for other programs to leave the cores, in all.
        json: Where to write everything that was measured.
        page: A page with a section to write the tables into.
    """

    family: tuple[str, ...] = field(
        default=(), metadata={"help": f"out of {', '.join(FAMILIES)} [{', '.join(_AIMED)}]"}
    )
    rows: tuple[str, ...] = field(
        default=(), metadata={"help": f"numbers of rows M [{', '.join(map(str, ROWS))}]"}
    )
    size: tuple[str, ...] = field(
        default=(), metadata={"help": f"K x N, as 1024x2816 [all of {', '.join(map(str, SIDES))}]"}
    )
    rounds: int = field(default=LEAST_ROUNDS, metadata={"help": "interleaved rounds per cell"})
    quick: bool = field(
        default=False, metadata={"help": "a part of the grid, in less than five minutes"}
    )
    milliseconds: float = field(
        default=5.0, metadata={"help": "how long each contender runs in each round"}
    )
    threads: int = field(default=0, metadata={"help": "threads; 0 takes torch's default"})
    isa: str = field(
        default="",
        metadata={"help": f"hold all to fewer instructions: {', '.join(LIMITS)}"},
    )
    patience: float = field(
        default=300.0, metadata={"help": "seconds to wait for other programs to be quiet, in all"}
    )
    json: Path | None = field(
        default=None, metadata={"help": "write everything that was measured to a file"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the tables into"}
    )


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells to measure.

    Attributes:
        families: Names.
        rows: M.
        sizes: K and N.
    """

    families: tuple[str, ...]
    rows: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, options: KernelOptions) -> Grid:
        """Parse the requested cells.

        Raises:
            OptionsError: A family does not exist, or a number is none.
        """
        rows, sizes = (_QUICK_ROWS, _QUICK_SIZES) if options.quick else (ROWS, _all_sizes())
        return cls(
            tuple(pick(options.family or _AIMED, FAMILIES, "family")),
            tuple(number(text) for text in options.rows) or rows,
            tuple(size_of(text) for text in options.size) or sizes,
        )

    def count(self, limits: Limits) -> int:
        """Return how many cells there are."""
        weights = ((FAMILIES[name], k, n) for name in self.families for k, n in self.sizes)
        return len(self.rows) * sum(len(cold_and_warm(f, k, n, limits)) for f, k, n in weights)

    def seconds(self, limits: Limits, options: KernelOptions) -> float:
        """Return about how long it takes to measure them."""
        return sum(
            self._of_size(name, k, n, limits, options)
            for name in self.families
            for k, n in self.sizes
        )

    def _of_size(self, name: str, k: int, n: int, limits: Limits, options: KernelOptions) -> float:
        family = FAMILIES[name]
        total = _SECONDS_PER_WEIGHT * k * n * len(family.kinds)
        for kind in family.kinds.values():
            copied = kind.weight_bytes(k, n) * limits.copies(kind.weight_bytes(k, n))
            total += copied / _COPIED_BYTES_PER_SECOND
            for cold in cold_and_warm(family, k, n, limits):
                for m in self.rows:
                    call = _SLOWER * limits.seconds(kind, Shape(m, k, n), cold=cold)
                    total += options.rounds * max(call, options.milliseconds / 1000) + 2 * call
        return total


def run_kernels(options: KernelOptions, console: Console | None = None) -> KernelResults:
    """Measure, show tables, and write the requested files.

    Raises:
        OptionsError: A family or a number does not exist, or there are no kernels.
    """
    console = console or Console()
    if options.rounds < LEAST_ROUNDS or options.threads < 0:
        raise OptionsError(
            f"{options.rounds} rounds with {options.threads} threads cannot be measured",
            fix=f"ask for {LEAST_ROUNDS} rounds or more, and 0 threads or more",
        )
    grid = Grid.of(options)
    outputs = Outputs(_SECTION, options.page, options.json)
    library = load_kernels()
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    try:
        results = _run(grid, options, _used(library.instruction_sets), outputs, console)
    finally:
        torch.set_num_threads(before)
    show_kernels(results, console)
    return results


def _run(
    grid: Grid,
    options: KernelOptions,
    instruction_sets: tuple[str, ...],
    outputs: Outputs,
    console: Console,
) -> KernelResults:
    setting = Setting.here(torch.get_num_threads())
    cache_bytes = Target.detect(extensions=False).l3_bytes
    with console.status("measuring what this machine can do"):
        limits, user = measure_limits(cache_bytes)
    console.print(limits_text(limits), highlight=False)
    count, seconds = grid.count(limits), grid.seconds(limits, options)
    finish = time.strftime("%H:%M", time.localtime(time.time() + seconds))
    console.print(
        f"{count} cells, about {seconds / 60:.0f} minutes, until {finish}; at most "
        f"{options.patience / 60:.0f} more where the machine is not quiet",
        highlight=False,
    )
    stillness = Stillness(options.patience)
    plan = Plan(limits, user, options.rounds, options.milliseconds / 1000, stillness)
    background = BackgroundLoad()
    cells: list[Cell] = []
    results = KernelResults(setting, instruction_sets, limits, options.rounds, (), 0.0)
    with watching(console, count) as watch:
        for size in grid.sizes:
            for name in grid.families:
                cells.extend(_cells(name, size, grid.rows, plan, watch))
            # On a machine that others use, one look at what it can do is not enough.
            limits = limits.or_better(measure_limits(cache_bytes)[0])
            # Keep the results so far, even if the rest fails.
            results = KernelResults(
                setting, instruction_sets, limits, options.rounds, tuple(cells), background.share()
            )
            outputs.write(results.to_dict(), results=results, limits=limits_text(results.limits))
    return results


def _cells(
    name: str, size: tuple[int, int], rows: tuple[int, ...], plan: Plan, watch: Watch
) -> list[Cell]:
    """Measure one family at one size of the weight."""
    k, n = size
    watch.say(f"{name}: making weights of {k} x {n}")
    prepared = FAMILIES[name].prepare(k, n, plan.limits.copies)
    cells = []
    for m in rows:
        shape, contenders = Shape(m, k, n), prepared(m)
        for cold in cold_and_warm(FAMILIES[name], k, n, plan.limits):
            watch.say(f"{name}: {shape}, {'cold' if cold else 'warm'}")
            cells.append(plan.measure(name, shape, contenders, cold=cold))
            watch.advance()
    return cells


def _used(instruction_sets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths up to the one that runs: the last, unless a variable names another."""
    chosen = os.environ.get(ISA_VARIABLE) or instruction_sets[-1]
    return instruction_sets[: instruction_sets.index(chosen) + 1]


def _all_sizes() -> tuple[tuple[int, int], ...]:
    return tuple((k, n) for k in SIDES for n in SIDES)


def number(text: str) -> int:
    """Return a number of rows.

    Raises:
        OptionsError: The text is none.
    """
    if not text.isdigit() or int(text) == 0:
        raise OptionsError(f"{text!r} is not a number of rows", fix="write a whole number, as 32")
    return int(text)


def size_of(text: str) -> tuple[int, int]:
    """Return K and N.

    Raises:
        OptionsError: The text is not two numbers with an x between them.
    """
    k, times, n = text.partition("x")
    if not (times and k.isdigit() and n.isdigit() and int(k) and int(n)):
        raise OptionsError(f"{text!r} is not a size", fix="write K x N as 384x1536")
    return int(k), int(n)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(KernelOptions)
def main(**given: Any) -> None:
    """Measure qfuse's kernels against ops of torch that compute the same."""
    with exit_on_error():
        options = KernelOptions(**given)
        restart_with_limits(options.isa)
        run_kernels(options)


if __name__ == "__main__":
    main()
