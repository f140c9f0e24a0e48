"""``python -m qfuse_bench.experiments.predictions``: how good the cost model is.

Quantized linears of a grid of sizes are lowered for this machine, and all their alternatives are
timed: the kernels that accept them, and the float form. A table per instruction set shows by how
much predictions are wrong, and how often the one that is chosen is nearly the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from qfuse import kernels
from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.cost import CostModel, CostProfile, measure
from qfuse.cost.times import Times
from qfuse.ir.events import FLOAT, Lowered
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.lower import Measurer, Wishes, lower
from qfuse.lower.kernels.registry import all_kernels
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_token, stored_like
from qfuse_bench.harness.machine import BackgroundLoad, Setting
from qfuse_bench.harness.own_kernels import load_kernels
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.report.outputs import Outputs

CLOSE = 1.05
"""A choice is good if it takes at most this many times what the fastest one takes."""

MOST_ERROR = 0.15
"""The aim: the median error of predicted times."""

LEAST_CLOSE = 0.95
"""The aim: the part of the choices that are good."""

_SECTION = "predictions"

_ROWS, _SIZES = (1, 4, 32, 128, 512, 1500), ((384, 1536), (1024, 1024), (1024, 4096), (4096, 4096))
_QUICK_ROWS, _QUICK_SIZES = (1, 32, 256), ((384, 1536), (1024, 1024))
_GROUP = 32
# What a whole grid may take; a cell takes well below a second.
_SECONDS = 3600.0
# On a busy machine, as often as compilations would measure it.
_MOST_PROFILES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOptions:
    """What to measure.

    Attributes:
        quick: Whether to take a part of the grid.
        isa: Instruction sets of the kernels; none for those of the machine.
        page: A page with a section to write the tables into.
    """

    quick: bool = field(default=False, metadata={"help": "a part of the grid"})
    isa: tuple[str, ...] = field(
        default=(), metadata={"help": "an instruction set of the kernels [all of the machine]"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the tables into"}
    )


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the linears of a grid are quantized.

    Attributes:
        name: What the table calls it.
        weight: Spec of the weight.
        dynamic: Whether the activation is quantized per row at run time; otherwise it is float.
    """

    name: str
    weight: QuantSpec
    dynamic: bool = False


RECIPES = (
    Recipe("w8a8", per_channel(), dynamic=True),
    Recipe("w8a16", per_channel()),
    Recipe("w4a16", per_channel(block=(1, _GROUP), quant_min=-8, quant_max=7)),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One cell.

    Attributes:
        recipe: Name of the recipe.
        rows: Rows of the activation.
        size: Input and output features.
        predicted: Predicted seconds of the product, by alternative.
        measured: Measured ones.
        chosen: What the predictions choose.
    """

    recipe: str
    rows: int
    size: tuple[int, int]
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    chosen: str

    @property
    def errors(self) -> list[float]:
        """By how much each prediction is wrong, as a part of the measured time."""
        both = self.predicted.keys() & self.measured.keys()
        return [abs(self.predicted[n] / self.measured[n] - 1) for n in both]

    @property
    def is_close(self) -> bool:
        """Whether the choice is nearly the fastest."""
        taken = self.measured.get(self.chosen)
        return taken is not None and taken <= CLOSE * min(self.measured.values())


@dataclass(frozen=True, slots=True)
class Summary:
    """What some cells come to.

    Attributes:
        recipe: Their recipe, or ``all``.
        cells: Their number.
        error: The median error of all predictions.
        float_error: That of the float products.
        close: How many choices are nearly the fastest.
    """

    recipe: str
    cells: int
    error: float
    float_error: float
    close: int

    @classmethod
    def of(cls, recipe: str, cells: Sequence[Prediction]) -> Summary:
        """Summarize the cells."""
        errors = [error for cell in cells for error in cell.errors]
        floats = [
            abs(c.predicted[FLOAT] / c.measured[FLOAT] - 1) for c in cells if FLOAT in c.measured
        ]
        close = sum(cell.is_close for cell in cells)
        return cls(recipe, len(cells), median(errors), median(floats), close)

    @property
    def close_share(self) -> float:
        """The part of the choices that are nearly the fastest."""
        return self.close / self.cells

    @property
    def verdict(self) -> str:
        """Both aims, and whether they are met."""
        error = f"median error {self.error:.0%}, the aim is at most {MOST_ERROR:.0%}"
        close = f"choices within 5 % {self.close_share:.0%}, the aim is at least {LEAST_CLOSE:.0%}"
        return (
            f"{error}: {_met(self.error <= MOST_ERROR)}; "
            f"{close}: {_met(self.close_share >= LEAST_CLOSE)}"
        )


def _met(met: bool) -> str:
    return "met" if met else "missed"


@dataclass(frozen=True, slots=True)
class PathResult:
    """The predictions with one instruction set of the kernels.

    Attributes:
        isa: The instruction set.
        profile: The speeds that predictions are made from.
        cells: All cells.
    """

    isa: str
    profile: CostProfile
    cells: tuple[Prediction, ...]

    @property
    def summaries(self) -> list[Summary]:
        """Return that of every recipe, and of all cells."""
        recipes = dict.fromkeys(cell.recipe for cell in self.cells)
        parts = {name: [c for c in self.cells if c.recipe == name] for name in recipes}
        return [Summary.of(name, some) for name, some in (parts | {"all": self.cells}).items()]

    @property
    def misses(self) -> list[str]:
        """Return a line per choice that is not nearly the fastest."""
        return [_miss_text(cell) for cell in self.cells if not cell.is_close]


def linear_graph(recipe: Recipe, rows: int, size: tuple[int, int]) -> NormalGraph:
    """Return a graph with one linear."""
    depth, columns = size
    b = GraphBuilder()
    x = b.arg("x", torch.float32, rows, depth)
    if recipe.dynamic:
        spec = per_token(2)
        scale = b.arg("scale", torch.float32, rows, 1)
        q = b.call(ops.quantize, x, scale, None, str(spec))
        x = b.call(ops.dequantize, q, scale, None, str(spec))
    grid = recipe.weight.grid((columns, depth))
    stored = b.const("w", stored_like(recipe.weight, columns, depth))
    scales = b.const("w_scale", torch.rand(grid) * 0.01 + 1e-3)
    weight = b.call(ops.dequantize, stored, scales, None, str(recipe.weight))
    return b.done(b.call(torch.ops.aten.linear.default, x, weight))


def predict(
    recipe: Recipe, rows: int, size: tuple[int, int], profile: CostProfile, measurer: Measurer
) -> Prediction:
    """Lower one linear by predictions, and by times; return both."""
    program, cost = linear_graph(recipe, rows, size), CostModel(profile)
    target, registry = Target.detect(extensions=False), all_kernels(kernels.load())

    def run(wishes: Wishes) -> Lowered:
        low = lower(optimize(clone(program)), target, cost, registry, None, wishes)
        return next(event for event in low.log.of(Lowered) if " x " in event.what)

    times = Times()
    chosen = run(Wishes())
    run(Wishes(times=times, measurer=measurer))
    (measured,) = times.known.values()
    return Prediction(recipe.name, rows, size, measurer.predicted, measured, chosen.kernel)


def run_predictions(options: PredictionOptions, console: Console) -> list[PathResult]:
    """Measure, show tables, and write what was asked for."""
    outputs = Outputs(_SECTION, options.page)
    library = load_kernels()
    rows, sizes = (_QUICK_ROWS, _QUICK_SIZES) if options.quick else (_ROWS, _SIZES)
    paths = options.isa or library.instruction_sets
    found, load = [], BackgroundLoad()
    with watching(console, len(paths) * len(RECIPES) * len(sizes) * len(rows)) as watch:
        for name in paths:
            with kernels.instruction_set(name):
                profile = _profile()
                cells = tuple(predictions(rows, sizes, profile, watch, name))
            found.append(PathResult(name, profile, cells))
    for path in found:
        console.print(prediction_table(path))
        for line in (path.summaries[-1].verdict, *path.misses):
            console.print(f"  {line}", style="dim", highlight=False)
    setting = Setting.here(torch.get_num_threads())
    outputs.write(setting=setting, paths=found, others=load.share())
    return found


def _profile() -> CostProfile:
    """Measure the machine, again if it is busy; return the best speeds."""
    target = Target.detect(extensions=False)
    profile = measure(target)
    for _ in range(_MOST_PROFILES - 1):
        if profile.quiet:
            break
        again = measure(target)
        profile = again if again.quiet else profile.best_of(again)
    return profile


def predictions(
    rows: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    profile: CostProfile,
    watch: Watch,
    isa: str,
) -> Iterator[Prediction]:
    """Yield every cell of a grid."""
    for recipe in RECIPES:
        for size in sizes:
            watch.say(f"{isa}: {recipe.name}, {size[0]} x {size[1]}")
            for count in rows:
                yield predict(recipe, count, size, profile, Measurer(_SECONDS, close=None))
                watch.advance()


def prediction_table(path: PathResult) -> Table:
    """Return the errors and the choices of every recipe, and of all."""
    table = Table(title=f"Cost model, {path.isa}", title_justify="left")
    for name in ("recipe", "cells", "median error", "error of float", "choice within 5 %"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    for one in path.summaries:
        table.add_row(
            one.recipe,
            str(one.cells),
            f"{one.error:.0%}",
            f"{one.float_error:.0%}",
            f"{one.close} ({one.close_share:.0%})",
        )
    return table


def _miss_text(cell: Prediction) -> str:
    sizes = " x ".join(map(str, (cell.rows, *cell.size)))
    times = ", ".join(
        f"{name} {cell.predicted.get(name, 0) * 1e6:.0f} -> {seconds * 1e6:.0f} us"
        for name, seconds in sorted(cell.measured.items(), key=lambda one: one[1])
    )
    return f"{cell.recipe} {sizes}: {cell.chosen} chosen; predicted -> measured: {times}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(PredictionOptions)
def main(**given: Any) -> None:
    """Compare predicted with measured times of qfuse's kernels and of the float form."""
    with exit_on_error():
        run_predictions(PredictionOptions(**given), Console())


if __name__ == "__main__":
    main()
