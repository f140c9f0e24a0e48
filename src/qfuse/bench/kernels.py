"""Our kernels against the ops of torch that compute the same: ``python -m qfuse.bench.kernels``.

Interleaved rounds, the order drawn anew in each; ratios of medians with their 95 % interval over
rounds. Weights are warm: a shape's weight stays in whatever cache holds it. Where something else
uses the cores, a team of threads waits for a whole scheduler slice at once and medians jump; the
last line, of what each took in its best tenth, is what a quiet machine would give.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

from qfuse.bench.measure import LEAST_ROUNDS, compare, measure
from qfuse.bench.stats import geometric_mean
from qfuse.ir.errors import OptionsError
from qfuse.kernels import linear_w8a8, linear_w8a8_quantized, linear_w8a16, load, pack_weight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qfuse.bench.measure import Series
    from qfuse.bench.stats import Ratio

__all__ = ["FAMILIES", "Family", "Shape", "main", "run"]

ROWS = (1, 4, 16, 32, 128, 512)
SIZES = ((384, 384), (384, 1536), (1536, 384), (1024, 1024), (1024, 2816), (4096, 4096))

Contenders = dict[str, Callable[[], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A product of ``[m, k]`` and ``[k, n]``."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n}"


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels that compute the same.

    Attributes:
        title: Of the table.
        contenders: Functions that compute one linear of random numbers, by name; the first one is
            what the others are compared with.
    """

    title: str
    contenders: Callable[[Shape], Contenders]


@dataclass(slots=True)
class _Timed:
    """A function that can be timed."""

    run: Callable[[], torch.Tensor]

    def time_block(self, calls: int) -> list[float]:
        """Return the seconds of each of ``calls`` calls."""
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - start)
        return times


def _weight(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stored weight, scale and bias."""
    weight = torch.randint(-128, 128, (shape.n, shape.k), dtype=torch.int8)
    return weight, torch.rand(shape.n) * 0.01 + 0.003, torch.randn(shape.n)


def int8(shape: Shape) -> Contenders:
    """Stored activations; ours first with a scale per row, then with one scale and in variants.

    The oneDNN op takes one scale for all rows. It would take int8 too, but without AMX that is a
    reference loop, a thousand times slower.
    """
    weight, w_scale, bias = _weight(shape)
    packed, sums = pack_weight(weight)
    x = torch.randint(-128, 128, (shape.m, shape.k), dtype=torch.int8)
    x_scale = torch.rand(shape.m) * 0.01 + 0.003
    column = x_scale[:, None]
    unsigned = (x.to(torch.int16) + 128).to(torch.uint8)
    one, zero = torch.tensor([0.01]), torch.tensor([128], dtype=torch.int32)
    prepacked = torch.ops.onednn.qlinear_prepack(weight, None)
    w_zero = torch.zeros_like(w_scale, dtype=torch.int64)
    qlinear = torch.ops.onednn.qlinear_pointwise.default
    ours = (x, x_scale, None, packed, sums, w_scale)
    return {
        "per token": lambda: linear_w8a8(*ours, bias=bias),
        "qlinear u8": lambda: qlinear(
            unsigned, 0.01, 128, prepacked, w_scale, w_zero, bias, 1.0, 0, torch.float32, "none",
            [], "",
        ),
        # torch.compile fuses what follows `_int_mm` into one pass; this is nearly that.
        "_int_mm": lambda: torch.addcmul(
            bias, torch.ops.aten._int_mm.default(x, weight.t()) * column, w_scale
        ),
        "u8": lambda: linear_w8a8(unsigned, one, zero, packed, sums, w_scale, bias=bias),
        "to bf16": lambda: linear_w8a8(*ours, bias=bias, real=torch.bfloat16),
        "gelu": lambda: linear_w8a8(*ours, bias=bias, epilogue="act(gelu)"),
        "to codes": lambda: linear_w8a8_quantized(
            *ours, bias=bias, out_scale=one, out_zero_point=None, quant_min=-128, quant_max=127,
            out_dtype=torch.int8,
        ),
    }  # fmt: skip


def weight_only(shape: Shape, dtype: torch.dtype) -> Contenders:
    """Real activations; the GEMM of their type reads weights two or four times as large."""
    weight, w_scale, bias = _weight(shape)
    packed, _ = pack_weight(weight)
    x = torch.randn(shape.m, shape.k).to(dtype)
    real, real_scale = (weight * w_scale[:, None]).to(dtype), w_scale.to(dtype)
    real_bias = bias.to(dtype)
    found: Contenders = {
        "qfuse": lambda: linear_w8a16(x, packed, w_scale, bias=bias),
        "linear": lambda: F.linear(x, real, real_bias),
    }
    if dtype == torch.bfloat16 and shape.m <= _MOST_ROWS_OF_ATEN:
        found["int8pack_mm"] = lambda: torch.ops.aten._weight_int8pack_mm.default(
            x, weight, real_scale
        )
    return found


# Behind that, and in float32, it is many times slower than the GEMM: it would take all the time.
_MOST_ROWS_OF_ATEN = 32

FAMILIES = {
    "w8a8": Family("int8 linears", int8),
    "w8a16": Family("weight-only, bfloat16", lambda shape: weight_only(shape, torch.bfloat16)),
    "w8a32": Family("weight-only, float32", lambda shape: weight_only(shape, torch.float32)),
}


def run(family: Family, shapes: Iterable[Shape], rounds: int, block_seconds: float) -> Table:
    """Measure every shape and lay out the table.

    Args:
        family: What to compare.
        shapes: What to measure it on.
        rounds: Interleaved rounds per shape.
        block_seconds: How long each contender runs in each round.
    """
    rows: list[list[str]] = []
    medians: dict[str, list[float]] = {}
    quiet: dict[str, list[float]] = {}
    ours = ""
    for shape in shapes:
        timed = {name: _Timed(function) for name, function in family.contenders(shape).items()}
        ours, *others = timed
        series = measure(timed, rounds, block_seconds=block_seconds)
        cells = {}
        for name in others:
            cells[name] = compare(series[ours], series[name])
            medians.setdefault(name, []).append(series[ours].median / series[name].median)
            quiet.setdefault(name, []).append(series[ours].p10 / series[name].p10)
        rows.append(_row(shape, series[ours], [cells.get(name) for name in medians]))
    table = Table(title=f"{family.title}, {torch.get_num_threads()} threads, {rounds} rounds")
    for column in ("M x K x N", f"{ours}, us", "GOP/s", *(f"/ {name}" for name in medians)):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    table.add_section()
    for title, ratios in (("geometric mean", medians), ("of the 10 % quantiles", quiet)):
        means = (f"{geometric_mean(values):.2f}" for values in ratios.values())
        table.add_row(title, "", "", *means)
    return table


def _row(shape: Shape, ours: Series, ratios: Iterable[Ratio | None]) -> list[str]:
    rate = 2 * shape.m * shape.k * shape.n / ours.median / 1e9
    cells = [f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" if r else "-" for r in ratios]
    return [str(shape), f"{ours.median * 1e6:.1f}", f"{rate:.0f}", *cells]


def _shapes(rows: Iterable[int], sizes: Iterable[str] | None) -> list[Shape]:
    pairs = SIZES if sizes is None else [_size(text) for text in sizes]
    return [Shape(m, k, n) for k, n in pairs for m in rows]


def _size(text: str) -> tuple[int, int]:
    k, times, n = text.partition("x")
    if not (times and k.isdigit() and n.isdigit()):
        raise OptionsError(f"{text!r} is no size", fix="write K x N as 384x1536")
    return int(k), int(n)


def main(
    family: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(FAMILIES)}.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Numbers of rows M.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="K x N, as 384x1536.")] = None,
    rounds: Annotated[int, typer.Option(min=LEAST_ROUNDS, help="Interleaved rounds.")] = 15,
    milliseconds: Annotated[float, typer.Option(help="Of each contender in a round.")] = 20.0,
) -> None:
    """Compare our linears with torch's. Below 1 ours is faster."""
    library = load()
    console = Console()
    if not library.available:
        console.print(f"no kernels: {library.reason}")
        raise typer.Exit(1)
    console.print(f"instruction sets: {', '.join(library.instruction_sets)}")
    for name in family or FAMILIES:
        if name not in FAMILIES:
            raise OptionsError(f"{name!r} is no family", fix=f"one of: {', '.join(FAMILIES)}")
        with console.status(f"measuring {name}"):
            table = run(FAMILIES[name], _shapes(rows or ROWS, size), rounds, milliseconds / 1000)
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
