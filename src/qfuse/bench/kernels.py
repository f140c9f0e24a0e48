"""Our kernels against the ops of torch that compute the same: ``python -m qfuse.bench.kernels``.

Interleaved rounds, the order drawn anew in each; ratios of medians with their 95 % interval over
rounds. Weights are warm: a shape's weight stays in whatever cache holds it. Where something else
uses the cores, a team of threads waits for a whole scheduler slice at once and medians jump; the
last line, of what each took in its best tenth, is what a quiet machine would give.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from qfuse.bench.measure import LEAST_ROUNDS, compare, measure
from qfuse.bench.stats import geometric_mean
from qfuse.kernels import linear_w8a8, linear_w8a8_quantized, load, pack_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from qfuse.bench.measure import Series
    from qfuse.bench.stats import Ratio

__all__ = ["Shape", "contenders", "main", "run"]

ROWS = (1, 4, 16, 32, 128, 512)
SIZES = ((384, 384), (384, 1536), (1536, 384), (1024, 1024), (1024, 2816), (4096, 4096))

OURS = "qfuse s8 per token"
# int8 activations of `qlinear_pointwise` are not among them: without AMX torch takes a reference
# loop for those, which is a thousand times slower.
COLUMNS = ("qlinear u8", "_int_mm s8 per token", "bf16 linear")
VARIANTS = ("qfuse u8", "qfuse bf16", "qfuse gelu", "qfuse to codes")


@dataclass(frozen=True, slots=True)
class Shape:
    """A product of ``[m, k]`` and ``[k, n]``."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n}"


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


def contenders(shape: Shape) -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions that compute one linear of random numbers, by name."""
    x = torch.randint(-128, 128, (shape.m, shape.k), dtype=torch.int8)
    weight = torch.randint(-128, 128, (shape.n, shape.k), dtype=torch.int8)
    x_scale, one = torch.rand(shape.m) * 0.01 + 0.003, torch.tensor([0.01])
    w_scale, bias = torch.rand(shape.n) * 0.01 + 0.003, torch.randn(shape.n)
    packed, sums = pack_weight(weight)
    return {
        OURS: lambda: linear_w8a8(x, x_scale, None, packed, sums, w_scale, bias=bias),
        "qfuse bf16": lambda: linear_w8a8(
            x, x_scale, None, packed, sums, w_scale, bias=bias, real=torch.bfloat16
        ),
        "qfuse gelu": lambda: linear_w8a8(
            x, x_scale, None, packed, sums, w_scale, bias=bias, epilogue="act(gelu)"
        ),
        "qfuse to codes": lambda: linear_w8a8_quantized(
            x, x_scale, None, packed, sums, w_scale, bias=bias, out_scale=one,
            out_zero_point=None, quant_min=-128, quant_max=127, out_dtype=torch.int8,
        ),
        **_unsigned(x, weight, w_scale, bias),
        **_peers(x, weight, x_scale, w_scale, bias),
    }  # fmt: skip


def _unsigned(
    x: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """One scale and zero point for the activation: all that the oneDNN op can do."""
    unsigned = (x.to(torch.int16) + 128).to(torch.uint8)
    packed, sums = pack_weight(weight)
    scale, zero = torch.tensor([0.01]), torch.tensor([128], dtype=torch.int32)
    prepacked = torch.ops.onednn.qlinear_prepack(weight, None)
    w_zero = torch.zeros_like(w_scale, dtype=torch.int64)
    qlinear = torch.ops.onednn.qlinear_pointwise.default
    return {
        "qfuse u8": lambda: linear_w8a8(unsigned, scale, zero, packed, sums, w_scale, bias=bias),
        "qlinear u8": lambda: qlinear(
            unsigned, 0.01, 128, prepacked, w_scale, w_zero, bias, 1.0, 0, torch.float32, "none",
            [], "",
        ),
    }  # fmt: skip


def _peers(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor,
) -> dict[str, Callable[[], torch.Tensor]]:
    real_x, real_w = x.bfloat16(), weight.bfloat16()
    real_bias, column = bias.bfloat16(), x_scale[:, None]
    return {
        # torch.compile fuses what follows `_int_mm` into one pass; so does this, nearly.
        "_int_mm s8 per token": lambda: torch.addcmul(
            bias, torch._int_mm(x, weight.t()) * column, w_scale
        ),
        "bf16 linear": lambda: torch.nn.functional.linear(real_x, real_w, real_bias),
    }  # fmt: skip


def run(shapes: Iterable[Shape], rounds: int, block_seconds: float) -> Table:
    """Measure every shape and lay out the table.

    Args:
        shapes: What to measure.
        rounds: Interleaved rounds per shape.
        block_seconds: How long each contender runs in each round.
    """
    table = Table(
        title=f"int8 linears, {torch.get_num_threads()} threads, medians of {rounds} rounds"
    )
    for name in ("M x K x N", f"{OURS}, us", "GOP/s"):
        table.add_column(name, justify="right")
    for name in (*COLUMNS, *VARIANTS):
        table.add_column(f"/ {name}", justify="right")
    names = (*COLUMNS, *VARIANTS)
    medians: dict[str, list[float]] = {name: [] for name in names}
    quiet: dict[str, list[float]] = {name: [] for name in names}
    for shape in shapes:
        timed = {name: _Timed(function) for name, function in contenders(shape).items()}
        series = measure(timed, rounds, block_seconds=block_seconds)
        found = {name: compare(series[OURS], series[name]) for name in names}
        for name, ratio in found.items():
            if ratio is not None:
                medians[name].append(ratio.value)
                quiet[name].append(series[OURS].p10 / series[name].p10)
        table.add_row(*_row(shape, series[OURS], found.values()))
    table.add_section()
    for title, ratios in (("geometric mean", medians), ("of the 10 % quantiles", quiet)):
        means = (f"{geometric_mean(values):.2f}" for values in ratios.values())
        table.add_row(title, "", "", *means)
    return table


def _row(shape: Shape, ours: Series, ratios: Iterable[Ratio | None]) -> list[str]:
    rate = 2 * shape.m * shape.k * shape.n / ours.median / 1e9
    cells = [f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" if r else "-" for r in ratios]
    return [str(shape), f"{ours.median * 1e6:.1f}", f"{rate:.0f}", *cells]


def main(
    rows: Annotated[list[int], typer.Option(help="Numbers of rows M.")] = list(ROWS),  # noqa: B006
    size: Annotated[list[str] | None, typer.Option(help="K x N, as 384x1536.")] = None,
    rounds: Annotated[int, typer.Option(min=LEAST_ROUNDS, help="Interleaved rounds.")] = 15,
    milliseconds: Annotated[float, typer.Option(help="Of each contender in a round.")] = 20.0,
) -> None:
    """Compare our int8 linears with torch's. Below 1 ours is faster."""
    library = load()
    console = Console()
    if not library.available:
        console.print(f"no kernels: {library.reason}")
        raise typer.Exit(1)
    sizes = [tuple(map(int, text.split("x"))) for text in size] if size else SIZES
    shapes = [Shape(m, k, n) for k, n in sizes for m in rows]
    with console.status("measuring"):
        table = run(shapes, rounds, milliseconds / 1000)
    console.print(
        f"instruction sets: {', '.join(library.instruction_sets)}; ratios below 1: ours is faster"
    )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
