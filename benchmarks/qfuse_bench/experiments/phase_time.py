"""``python -m qfuse_bench.experiments.phase_time``: the time to move, combine and merge.

Graphs are synthetic and rich in what this phase looks at: see
:mod:`qfuse_bench.workloads.movement_graphs`. Times are CPU seconds of this process, so other
programs do not show in them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.errors import OptionsError
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.merge.merge_convolutions import MergeConvolutions
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.optimize.schedule import move, sink_splits
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.progress import watching
from qfuse_bench.harness.stats import median
from qfuse_bench.report.outputs import Outputs
from qfuse_bench.workloads.movement_graphs import KINDS, calls_in, movement_graph

SIZES = (1_000, 3_000, 10_000)
MOST_SECONDS = 10.0
"""What the greatest graph may take."""

_SECTION = "phase-cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseOptions:
    """What to measure.

    Attributes:
        rounds: How often each graph goes through the phase.
        most: The greatest number of calls.
        page: A page with a section to write the table into.
    """

    rounds: int = field(default=3, metadata={"help": "rounds per graph"})
    most: int = field(default=SIZES[-1], metadata={"help": "the greatest number of calls"})
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One graph.

    Attributes:
        graph: Its kind, out of :data:`qfuse_bench.workloads.movement_graphs.KINDS`.
        calls: Calls in it.
        fired: Rewrites in all.
        combine: CPU seconds of the first sweep of value numbering, per round.
        move: CPU seconds of moving, with the sweeps in between, per round.
        merge: CPU seconds of merging and of bringing splits down, per round.
    """

    graph: str
    calls: int
    fired: int
    combine: tuple[float, ...]
    move: tuple[float, ...]
    merge: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median of the whole phase."""
        return median(
            [sum(parts) for parts in zip(self.combine, self.move, self.merge, strict=True)]
        )

    @property
    def per_call(self) -> float:
        """Seconds per call in the graph."""
        return self.seconds / self.calls


def run_phase_cost(options: PhaseOptions, console: Console) -> list[PhaseRow]:
    """Measure, show a table, and write what was asked for."""
    sizes = [size for size in SIZES if size <= options.most]
    if options.rounds < 1 or not sizes:
        raise OptionsError(
            f"{options.rounds} rounds up to {options.most} calls cannot be measured",
            fix=f"ask for at least 1 round and {SIZES[0]} calls",
        )
    outputs = Outputs(_SECTION, options.page)
    rows: list[PhaseRow] = []
    with watching(console, len(KINDS) * len(sizes)) as watch:
        for kind in KINDS:
            for size in sizes:
                watch.say(f"{kind}, {size} calls")
                rows.append(_measure(kind, movement_graph(kind, size), options.rounds))
                watch.advance()
    console.print(_table(rows))
    for line in verdicts(rows):
        console.print(line, highlight=False)
    outputs.write(rows=rows, setting=Setting.here(1), verdicts=verdicts(rows), median=median)
    return rows


def verdicts(rows: Sequence[PhaseRow]) -> list[str]:
    """Say what the rows come to."""
    slowest = max(rows, key=lambda row: row.seconds)
    name = f"{slowest.graph}, {slowest.calls} calls"
    taken = f"The slowest graph ({name}) takes {slowest.seconds:.1f} s"
    lines = [f"{taken}; the aim is at most {MOST_SECONDS:.0f} s."]
    for kind in dict.fromkeys(row.graph for row in rows):
        some = sorted((row for row in rows if row.graph == kind), key=lambda row: row.calls)
        first, last = some[0], some[-1]
        if last.calls > first.calls:
            lines.append(
                f"{kind}: from {first.calls} to {last.calls} calls the cost per call changes by a "
                f"factor of {last.per_call / first.per_call:.2f}."
            )
    return lines


def _measure(kind: str, program: NormalGraph, rounds: int) -> PhaseRow:
    parts: list[tuple[float, float, float]] = []
    fired = 0
    for _ in range(rounds):
        copy = clone(program)
        # Pinned, so that the same rewrites happen on every machine.
        context = RewriteContext("optimize", CostModel(CostProfile.pinned()))
        combine = _cpu_seconds(lambda: Combine().run(copy, context))  # noqa: B023 - called at once
        moving = _cpu_seconds(lambda: move(copy, context))  # noqa: B023
        merge = _cpu_seconds(lambda: _merge(copy, context))  # noqa: B023
        parts.append((combine, moving, merge))
        fired = len(context.budget.allowed)
    combined, moved, merged = zip(*parts, strict=True)
    return PhaseRow(kind, calls_in(program), fired, combined, moved, merged)


def _merge(program: NormalGraph, context: RewriteContext) -> None:
    MergeLinears().run(program, context)
    MergeConvolutions().run(program, context)
    sink_splits(program, context)


def _cpu_seconds(work: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _table(rows: Sequence[PhaseRow]) -> Table:
    table = Table(title="Moving, combining and merging", title_justify="left")
    table.add_column("graph")
    for column in ("calls", "rewrites", "combine ms", "move ms", "merge ms", "us per call"):
        table.add_column(column, justify="right")
    for row in rows:
        times = (f"{median(part) * 1e3:.0f}" for part in (row.combine, row.move, row.merge))
        table.add_row(
            row.graph, str(row.calls), str(row.fired), *times, f"{row.per_call * 1e6:.0f}"
        )
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(PhaseOptions)
def main(**given: Any) -> None:
    """Measure what moving, combining and merging cost on graphs of growing size."""
    with exit_on_error():
        run_phase_cost(PhaseOptions(**given), Console())


if __name__ == "__main__":
    main()
