"""``qfuse bench --goals``: measure the cells of the goals, and print the outcomes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qfuse_bench.experiments.goals import Cell, Finding, Outcome, findings_of
from qfuse_bench.harness.comparison import Comparison, Entry, Verdict
from qfuse_bench.harness.machine import BackgroundLoad, Setting, prepare_machine
from qfuse_bench.harness.process import WorkerError
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.peers.cases import CASES, example_inputs
from qfuse_bench.peers.contenders import (
    Contender,
    Engine,
    FloatType,
    eager_model,
    kernels_lacking,
    missing,
)
from qfuse_bench.report import format as words
from qfuse_bench.report.markdown import write_section
from qfuse_bench.report.results import entry_values
from qfuse_bench.report.tables import ratio_text, setting_text, time_text

_STYLE = {
    Outcome.MET: "green",
    Outcome.MISSED: "bold red",
    Outcome.UNDECIDED: "yellow",
    Outcome.NOT_MEASURED: "dim",
}


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell and its contenders.

    Attributes:
        cell: What was asked.
        entries: By the contender's name, without those that only give answers.
        others: The fraction of the machine that other programs used meanwhile.
        reason: Why nothing was measured; "" otherwise.
    """

    cell: Cell
    entries: Mapping[str, Entry]
    others: float
    reason: str = ""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The outcome of every bar."""
        return () if self.reason else findings_of(self.cell, self.entries)

    @property
    def rows(self) -> list[Entry]:
        """All contenders, ours first."""
        ours = self.cell.ours.on(CASES[self.cell.case]).name
        return sorted(self.entries.values(), key=lambda entry: entry.name != ours)


@dataclass(frozen=True, slots=True)
class GoalResults:
    """A whole run.

    Attributes:
        setting: What it was measured on.
        rounds: Rounds per cell.
        cells: In the order in which they were measured.
        absent: Contenders that could not take part, and what to do about it.
    """

    setting: Setting
    rounds: int
    cells: tuple[CellResult, ...]
    absent: Mapping[str, str]

    @property
    def others(self) -> float:
        """The worst of the cells: how busy the machine was with other things."""
        return max((cell.others for cell in self.cells), default=0.0)

    def trouble(self) -> list[str]:
        """Return a line for everything that is not a time, and why."""
        lines = [f"{name}: {reason}" for name, reason in self.absent.items()]
        for result in self.cells:
            if result.reason:
                lines.append(f"{result.cell.title}: {result.reason}")
            lines += [
                f"{result.cell.case}, {entry.name}: {entry.verdict}, {entry.reason}"
                for entry in result.entries.values()
                if entry.verdict is not Verdict.OK
            ]
        return list(dict.fromkeys(lines))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "rounds": self.rounds,
            "absent": dict(self.absent),
            "cells": [
                {
                    "case": result.cell.case,
                    "ours": result.cell.ours.on(CASES[result.cell.case]).name,
                    "others": result.others,
                    "reason": result.reason,
                    "findings": [finding.to_dict() for finding in result.findings],
                    "entries": [entry_values(entry) for entry in result.rows],
                }
                for result in self.cells
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalRun:
    """How to measure.

    Attributes:
        setting: The machine, with the threads of every contender.
        rounds: Interleaved rounds per cell.
        patience: Seconds to wait, per cell, for other programs to leave the cores.
        cells: What to measure.
        models: Only cells of these cases; none is all.
        section: What the section of the page is called.
        json: Where to write everything that was measured.
        page: A page with a section to write the tables into.
    """

    setting: Setting
    rounds: int
    patience: float
    cells: Sequence[Cell]
    models: Sequence[str] = ()
    section: str = "goals"
    json: Path | None = None
    page: Path | None = None


def run_goals(run: GoalRun, console: Console) -> GoalResults:
    """Measure every cell, show the outcomes, and write the requested files."""
    cells = [cell for cell in run.cells if not run.models or cell.case in run.models]
    absent = _absent(cells)
    results = GoalResults(run.setting, run.rounds, (), absent)
    steps = sum(2 + 2 * len(cell.ways) + run.rounds for cell in cells)
    with watching(console, steps) as watch:
        watch.say("building kernels and measuring speeds, once per machine")
        prepare_machine(run.setting.threads)
        for cell in cells:
            measured = _measure(cell, run, watch)
            # Keep the results so far, even if the rest fails.
            results = replace(results, cells=(*results.cells, measured))
            _write(results, run)
    _show(results, console)
    return results


def _absent(cells: Sequence[Cell]) -> dict[str, str]:
    engines = dict.fromkeys(way.engine for cell in cells for way in cell.ways)
    absent = {str(engine): reason for engine in engines if (reason := missing(engine))}
    return absent | kernels_lacking()


def _measure(cell: Cell, run: GoalRun, watch: Watch) -> CellResult:
    case = CASES[cell.case]
    contenders = [way.on(case) for way in cell.ways if not missing(way.engine)]
    float_model = Contender(
        engine=Engine.EAGER, float_type=FloatType.F32, model=case.model, sizes=case.sizes
    )
    like = {c.name: _like(c) for c in contenders}
    background = BackgroundLoad()
    try:
        inputs = example_inputs(case, case.seeds)
        with Comparison(inputs, float_model.name, run.setting.threads, watch) as contest:
            contest.enter([float_model.competitor(timed=False)])
            eager = {e.name: e for e in like.values()}
            contest.enter([e.competitor(timed=False) for e in eager.values()])
            contest.enter([c.competitor(like[c.name].name) for c in contenders])
            background = BackgroundLoad()
            entries = contest.run(run.rounds, cell.title, run.patience)
            others = background.share()
    except WorkerError as error:
        return CellResult(cell, {}, background.share(), str(error))
    return CellResult(cell, {c.name: entries[c.name] for c in contenders}, others)


def _like(contender: Contender) -> Contender:
    """Return the quantized model without a compiler, which shows what its bits are worth."""
    assert contender.recipe is not None, "cells are about quantized models"
    return eager_model(
        contender.model, contender.sizes, contender.recipe, group_size=contender.group_size
    )


def _write(results: GoalResults, run: GoalRun) -> None:
    if run.json is not None:
        run.json.write_text(json.dumps(results.to_dict(), indent=1), encoding="utf-8")
    if run.page is not None:
        write_section(run.page, run.section, results=results)


def _show(results: GoalResults, console: Console) -> None:
    console.print(_goals(results))
    console.print(_entries(results))
    console.print(setting_text(results.setting, results.rounds, results.others))
    for line in results.trouble():
        console.print(escape(line), style="red", highlight=False)


def _goals(results: GoalResults) -> Table:
    table = Table(title="Goals; ratio: qfuse / the best rival", title_justify="left")
    for column in ("qfuse runs", "to be ahead of", "best rival"):
        table.add_column(column)
    for column in ("at most", "ratio", "outcome"):
        table.add_column(column, justify="right")
    for result in results.cells:
        for finding in result.findings:
            table.add_row(
                result.cell.title,
                finding.bar.name,
                finding.best or "-",
                f"{1 / finding.bar.factor:.2f}",
                ratio_text(finding.ratio),
                f"[{_STYLE[finding.outcome]}]{escape(finding.text)}[/]",
            )
        table.add_section()
    return table


def _entries(results: GoalResults) -> Table:
    title = "Medians in ms (10 % of the calls are below the figure in parentheses)"
    table = Table(title=title, title_justify="left")
    for column in ("model", "who"):
        table.add_column(column)
    for column in ("ms", "dB", "MB after the rounds (peak)"):
        table.add_column(column, justify="right")
    for result in results.cells:
        for entry in result.rows:
            table.add_row(
                result.cell.case,
                entry.name,
                time_text(entry),
                words.decibels(entry.sqnr),
                words.memory(entry),
            )
        table.add_section()
    return table
