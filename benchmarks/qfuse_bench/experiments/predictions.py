"""``python -m qfuse_bench.experiments.predictions``: how good the cost model is.

Quantized linears of a grid of sizes are lowered for this machine, and all their alternatives are
timed: the kernels that accept them, and the float form. A table per instruction set shows by how
much predictions are wrong, and how often the one that is chosen is nearly the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table

from qfuse import kernels
from qfuse.cli.errors import exit_on_error
from qfuse.cost import CostModel, CostProfile, measure
from qfuse.cost.times import Times
from qfuse.ir.errors import OptionsError
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

CLOSE = 1.05
"""A choice is good if it takes at most this many times what the fastest one takes."""

_ROWS, _SIZES = (1, 4, 32, 128, 512), ((384, 1536), (1024, 1024), (1024, 4096), (4096, 4096))
_QUICK_ROWS, _QUICK_SIZES = (1, 32, 256), ((384, 1536), (1024, 1024))
_GROUP = 32
# What a whole grid may take; a cell takes well below a second.
_SECONDS = 3600.0


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


def predictions(
    rows: Sequence[int], sizes: Sequence[tuple[int, int]], profile: CostProfile
) -> Iterator[Prediction]:
    """Yield every cell of a grid."""
    for recipe in RECIPES:
        for size in sizes:
            for count in rows:
                yield predict(recipe, count, size, profile, Measurer(_SECONDS, close=None))


def prediction_table(isa: str, cells: Sequence[Prediction]) -> Table:
    """Return the errors and the choices of every recipe, and of all."""
    table = Table(title=f"Cost model, {isa}", title_justify="left")
    for name in ("recipe", "cells", "median error", "error of float", "choice within 5 %"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    for name in (*dict.fromkeys(cell.recipe for cell in cells), "all"):
        some = [cell for cell in cells if name in {"all", cell.recipe}]
        errors = [error for cell in some for error in cell.errors]
        floats = [
            abs(c.predicted[FLOAT] / c.measured[FLOAT] - 1) for c in some if FLOAT in c.measured
        ]
        close = sum(cell.is_close for cell in some)
        table.add_row(
            name,
            str(len(some)),
            f"{median(errors):.0%}",
            f"{median(floats):.0%}",
            f"{close} ({close / len(some):.0%})",
        )
    return table


@click.command()
@click.option("--quick", is_flag=True, help="a part of the grid, in about a minute per path")
@click.option("--isa", multiple=True, help="an instruction set of the kernels [all of the machine]")
def main(quick: bool, isa: tuple[str, ...]) -> None:
    """Compare predicted with measured times of qfuse's kernels and of the float form."""
    with exit_on_error():
        library = kernels.load()
        if not library.available:
            raise OptionsError(f"no kernels to measure: {library.reason}", fix="see qfuse doctor")
        for name in isa or library.instruction_sets:
            with kernels.instruction_set(name):
                _show(name, Console(), quick=quick)


def _show(isa: str, console: Console, *, quick: bool) -> None:
    rows, sizes = (_QUICK_ROWS, _QUICK_SIZES) if quick else (_ROWS, _SIZES)
    profile = measure(Target.detect(extensions=False))
    cells = list(predictions(rows, sizes, profile))
    console.print(prediction_table(isa, cells))
    for cell in cells:
        if not cell.is_close:
            console.print(_miss_text(cell), style="dim", highlight=False)


def _miss_text(cell: Prediction) -> str:
    sizes = " x ".join(map(str, (cell.rows, *cell.size)))
    times = ", ".join(
        f"{name} {cell.predicted.get(name, 0) * 1e6:.0f} -> {seconds * 1e6:.0f} us"
        for name, seconds in sorted(cell.measured.items(), key=lambda one: one[1])
    )
    return f"  {cell.recipe} {sizes}: {cell.chosen} chosen; predicted -> measured: {times}"


if __name__ == "__main__":
    main()
