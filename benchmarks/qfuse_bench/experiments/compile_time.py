"""``python -m qfuse_bench.experiments.compile_time``: the time to optimize, by size of graph.

The measure is one fake-tensor propagation of the captured graph, which every compiler of such
graphs does at least once. Times are CPU seconds of this process: all of it is work of one thread,
and other programs do not show in it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qfuse import kernels, zoo
from qfuse.capture import capture
from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.cost import CostModel, load_or_measure
from qfuse.ir.errors import OptionsError
from qfuse.ir.events import EventLog, Fired, Lowered
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.pipeline import Pipeline
from qfuse.targets import Target
from qfuse.zoo import recipes
from qfuse_bench.harness._torch_api import propagate
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.harness.stats import median, quantile
from qfuse_bench.report.outputs import Outputs
from qfuse_bench.workloads.block_graphs import blocks

SIZES = (50, 100, 200, 500, 1000, 2000)
MOST_PROPAGATIONS = 3.0
"""The limit of the optimization time, in propagations of the captured graph."""

# Up to so many linears every graph has all rounds; beyond it they take about as long together.
_FULL_ROUNDS = 500
_MODELS = ("minilm", "llama", "bert", "vit")
_SECTION = "compile-cost"
_LINEAR = "qfuse.linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """What to measure.

    Attributes:
        rounds: How often each graph is optimized and propagated; the great ones less often.
        most: The greatest number of linears.
        models: Whether to measure captured models too.
        page: A page with a section to write the tables into.
    """

    rounds: int = field(default=5, metadata={"help": "rounds per graph"})
    most: int = field(default=SIZES[-1], metadata={"help": "the greatest number of linears"})
    models: bool = field(default=True, metadata={"help": "measure captured models too"})
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the tables into"}
    )


@dataclass(frozen=True, slots=True)
class CostRow:
    """One graph.

    Attributes:
        graph: What it is.
        linears: Quantized linears in it.
        nodes: Calls in it.
        optimize: CPU seconds of normalize, optimize and lower, per round.
        propagate: CPU seconds of one fake-tensor propagation of the captured graph, per round.
    """

    graph: str
    linears: int
    nodes: int
    optimize: tuple[float, ...]
    propagate: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The optimization time in propagations."""
        return median(self.optimize) / median(self.propagate)

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the greatest ratio of a round."""
        ratios = [a / b for a, b in zip(self.optimize, self.propagate, strict=True)]
        return quantile(ratios, 0.0), quantile(ratios, 1.0)

    @property
    def per_linear(self) -> float:
        """CPU seconds of optimizing, per linear."""
        return median(self.optimize) / self.linears


def growth(rows: Sequence[CostRow]) -> float:
    """Return by which factor the cost per linear grows from the smallest graph to the greatest."""
    ordered = sorted(rows, key=lambda row: row.linears)
    return ordered[-1].per_linear / ordered[0].per_linear


def run_compile_cost(options: CostOptions, console: Console) -> list[CostRow]:
    """Measure, show a table, and write the requested files."""
    if options.rounds < 1 or options.most < SIZES[0]:
        raise OptionsError(
            f"{options.rounds} rounds up to {options.most} linears cannot be measured",
            fix=f"ask for at least 1 round and {SIZES[0]} linears",
        )
    outputs = Outputs(_SECTION, options.page)
    pipeline = _pipeline()
    makers = list(_graphs(options))
    rows: list[CostRow] = []
    with watching(console, len(makers)) as watch:
        for name, make in makers:
            rows.append(_measure(pipeline, name, make, options.rounds, watch))
            # The greatest graphs take minutes to build: what is measured is kept.
            outputs.write(
                rows=rows, setting=Setting.here(1), verdicts=verdicts(rows), median=median
            )
    console.print(_table(rows))
    for line in verdicts(rows):
        console.print(line, highlight=False)
    return rows


def verdicts(rows: Sequence[CostRow]) -> list[str]:
    """Say what the rows come to."""
    worst = max(rows, key=lambda row: row.ratio)
    dearest = f"The dearest graph ({worst.graph}) costs {worst.ratio:.2f} propagations to optimize"
    lines = [f"{dearest}; the aim is at most {MOST_PROPAGATIONS:.0f}."]
    for kind in _KINDS:
        some = [row for row in rows if row.graph == kind]
        if len(some) > 1:
            sizes = [row.linears for row in some]
            lines.append(
                f"{kind}: from {min(sizes)} to {max(sizes)} linears the cost per linear changes "
                f"by a factor of {growth(some):.2f}."
            )
    return lines


_KINDS = {"PT2E static": False, "PT2E dynamic": True}


def _graphs(options: CostOptions) -> Iterator[tuple[str, Callable[[], CapturedGraph]]]:
    for name in _MODELS if options.models else ():
        yield f"{name}, torchao dynamic", _model(name)
    for size in SIZES:
        for kind, dynamic in _KINDS.items():
            if size <= options.most:
                yield kind, _synthetic(size, dynamic=dynamic)


def _synthetic(size: int, *, dynamic: bool) -> Callable[[], CapturedGraph]:
    return lambda: blocks(size, dynamic=dynamic)


def _model(name: str) -> Callable[[], CapturedGraph]:
    def make() -> CapturedGraph:
        built = zoo.build(name)
        quantized = recipes.quantize(built.module, "w8a8-dynamic", built.args, built.kwargs)
        return capture(quantized.model, built.args, built.kwargs)

    return make


def _pipeline() -> Pipeline:
    target = Target.detect(extensions=False)
    return Pipeline(target, CostModel(load_or_measure(target)), kernels.load())


def _measure(
    pipeline: Pipeline, name: str, make: Callable[[], CapturedGraph], rounds: int, watch: Watch
) -> CostRow:
    watch.say(f"building {name}")
    captured = make()
    linears = _linears(pipeline.rewrite(captured).log)
    propagate(captured.module)
    optimizing, propagating = [], []
    watch.say(f"{name}, {linears} linears")
    for _ in range(max(1, min(rounds, rounds * _FULL_ROUNDS // linears))):
        optimizing.append(_cpu_seconds(lambda: pipeline.rewrite(captured)))
        propagating.append(_cpu_seconds(lambda: propagate(captured.module)))
    watch.advance()
    nodes = sum(node.op == "call_function" for node in captured.graph.nodes)
    return CostRow(name, linears, nodes, tuple(optimizing), tuple(propagating))


def _linears(log: EventLog) -> int:
    """Count the quantized linears of the source: siblings that were merged are several."""
    merged = sum(len(e.places) - 1 for e in log.of(Fired) if e.rule == MergeLinears.name)
    return sum(e.place.op == _LINEAR for e in log.of(Lowered)) + merged


def _cpu_seconds(work: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    result = work()
    seconds = time.process_time() - begin
    del result
    return seconds


def _table(rows: Sequence[CostRow]) -> Table:
    table = Table(
        title="Optimizing (normalize, optimize, lower) against one fake-tensor propagation",
        title_justify="left",
    )
    table.add_column("graph")
    for column in ("linears", "calls", "optimize ms", "propagate ms", "ratio", "us per linear"):
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row.spread
        style = "green" if row.ratio <= MOST_PROPAGATIONS else "red"
        table.add_row(
            row.graph,
            str(row.linears),
            str(row.nodes),
            f"{median(row.optimize) * 1e3:.0f}",
            f"{median(row.propagate) * 1e3:.0f}",
            Text(f"{row.ratio:.2f} [{low:.2f}, {high:.2f}]", style),
            f"{row.per_linear * 1e6:.0f}",
        )
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(CostOptions)
def main(**given: Any) -> None:
    """Measure what optimizing costs, and how it grows with the graph."""
    with exit_on_error():
        run_compile_cost(CostOptions(**given), Console())


if __name__ == "__main__":
    main()
