"""The results in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qfuse_bench.harness.comparison import Entry, Verdict
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.stats import Ratio
from qfuse_bench.report import format as words
from qfuse_bench.report.results import Results

_STYLE = {Verdict.OK: "", Verdict.WRONG: "bold red", Verdict.FAILED: "red"}


def show(results: Results, console: Console) -> None:
    """Print all results."""
    console.print(_pairs(results))
    console.print(_memory(results))
    console.print(_means(results))
    console.print(setting_text(results.setting, results.rounds, results.others))
    losses = results.losses
    style = "yellow" if losses else "green"
    console.print(results.against_float, style=style, highlight=False)
    for loss in losses:
        console.print(f"  {escape(str(loss))}", style=style, highlight=False)
    for line in results.trouble():
        console.print(escape(line), style="red", highlight=False)


def time_text(entry: Entry) -> Text:
    """Return an entry's time, or what stands in its place, colored."""
    return Text(words.time(entry), _STYLE[entry.verdict])


def ratio_text(value: Ratio | None) -> Text:
    """Return a ratio; green if it is surely below 1, yellow if surely above."""
    if value is None:
        return Text(words.ratio(None), "dim")
    style = "green" if value.high < 1 else "yellow" if value.low > 1 else ""
    return Text(words.ratio(value), style)


def setting_text(setting: Setting, rounds: int, others: float) -> Text:
    """Return the machine and software of a table."""
    versions = ", ".join(f"{name} {version}" for name, version in setting.versions)
    text = Text(
        f"{setting.cpu}, {setting.cores} cores, {setting.threads} threads; {versions}; "
        f"{setting.date}; {rounds} interleaved rounds; ",
        "dim",
    )
    busy = f"other programs used up to {others:.0%} of the cores meanwhile"
    return text.append(busy, "yellow" if others > words.DISTURBED else "dim")


def _pairs(results: Results) -> Table:
    table = _table(
        "Medians in ms (10 % of the calls are below the figure in parentheses); "
        "ratio: qfuse / Inductor + torchao, 95 % interval"
    )
    for column in ("model", "recipe", "rest in"):
        table.add_column(column)
    for column in ("Inductor, float", "Inductor + torchao", "qfuse", "ratio", "dB"):
        table.add_column(column, justify="right", no_wrap=True)
    for match in results.matches:
        for pair in match.pairs:
            table.add_row(
                pair.model,
                pair.recipe,
                str(pair.float_type),
                time_text(pair.plain),
                time_text(pair.theirs),
                time_text(pair.ours),
                ratio_text(pair.ratio),
                f"{words.decibels(pair.theirs.sqnr)} / {words.decibels(pair.ours.sqnr)}",
            )
        table.add_section()
    return table


def _memory(results: Results) -> Table:
    table = _table("Memory of the process in MB: after the rounds (peak of the rounds)")
    for column in ("model", "recipe", "rest in"):
        table.add_column(column)
    for column in ("Inductor, float", "Inductor + torchao", "qfuse"):
        table.add_column(column, justify="right", no_wrap=True)
    for pair in results.pairs:
        entries = (pair.plain, pair.theirs, pair.ours)
        cells = [words.memory(entry) for entry in entries]
        table.add_row(pair.model, pair.recipe, str(pair.float_type), *cells)
    return table


def _means(results: Results) -> Table:
    table = _table("Geometric mean of the ratios at equal float dtype")
    for column in ("of", "how many", "ratio"):
        table.add_column(column, justify="left" if column == "of" else "right")
    for name, ratio, count in results.means():
        table.add_row(name, str(count), ratio_text(ratio))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left")
