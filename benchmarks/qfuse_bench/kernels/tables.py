"""The kernels' benchmark in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qfuse_bench.kernels.cells import Cell
from qfuse_bench.kernels.results import KernelResults, Line
from qfuse_bench.kernels.roofline import Limits
from qfuse_bench.kernels.targets import Verdict
from qfuse_bench.report import format as words
from qfuse_bench.report.tables import ratio_text, setting_text

_STYLE = {
    Verdict.MET: "green",
    Verdict.MISSED: "bold red",
    Verdict.UNDECIDED: "yellow",
    Verdict.NOT_MEASURED: "dim",
}


def show_kernels(results: KernelResults, console: Console) -> None:
    """Print every cell and every verdict."""
    for name, title, peers, lines in results.families():
        console.print(_cells(f"{name}: {title}", peers, lines, results.limits))
    if results.judgements:
        console.print(_verdicts(results))
    console.print(limits_text(results.limits), highlight=False)
    console.print(setting_text(results.setting, results.rounds, results.others))


def limits_text(limits: Limits) -> str:
    """Return the limits of the machine, in words."""
    rates = ", ".join(f"{rate / 1e9:.0f} GOP/s {kind}" for kind, rate in limits.rates.items())
    return (
        f"reads {limits.memory / 1e9:.1f} GB/s from memory and {limits.cache / 1e9:.1f} GB/s from "
        f"a cache of {limits.cache_bytes >> 20} MB; computes {rates}"
    )


def _cells(title: str, peers: tuple[str, ...], lines: list[Line], limits: Limits) -> Table:
    table = Table(title=f"{title}; medians, and ours over theirs", title_justify="left")
    table.add_column("M x K x N", justify="right", no_wrap=True)
    for heat in ("cold", "warm"):
        table.add_column(f"{heat}, us", justify="right", no_wrap=True)
        table.add_column("of limit", justify="right", no_wrap=True)
        for peer in peers:
            table.add_column(f"/ {peer}", justify="right", no_wrap=True)
    for line in lines:
        cells = [text for cell in line.cells for text in _cell(cell, peers, limits)]
        table.add_row(str(line.shape), *cells)
    return table


def _cell(cell: Cell | None, peers: tuple[str, ...], limits: Limits) -> list[Text]:
    if cell is None:
        return [Text("-", "dim")] * (2 + len(peers))
    ratios = [ratio_text(cell.ratio(peer)) for peer in peers]
    return [
        Text(words.microseconds(cell.ours.median)),
        Text(f"{cell.reached(limits):.0%}"),
        *ratios,
    ]


def _verdicts(results: KernelResults) -> Table:
    table = Table(title="Targets: our time over theirs", title_justify="left")
    for column in ("target", "weights", "verdict", "what was measured"):
        table.add_column(column)
    for found in results.judgements:
        verdict = Text(found.verdict, _STYLE[found.verdict])
        table.add_row(
            str(found.target),
            "cold" if found.cold else "warm",
            verdict,
            found.reason(results.limits),
        )
    return table
