"""``qfuse bench --goals``: measure the cells of the goals, and print the outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qfuse_bench.experiments.aims import Aim
from qfuse_bench.experiments.goal_results import (
    CellResult,
    GoalResults,
    measured_before,
    unlimited_engines,
)
from qfuse_bench.experiments.goals import Cell, Outcome
from qfuse_bench.harness.comparison import Comparison
from qfuse_bench.harness.machine import BackgroundLoad, Setting, prepare_machine
from qfuse_bench.harness.machine_class import MachineClass
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
from qfuse_bench.report.outputs import Outputs
from qfuse_bench.report.tables import ratio_text, setting_text, time_text

_STYLE = {
    Outcome.MET: "green",
    Outcome.MISSED: "bold red",
    Outcome.UNDECIDED: "yellow",
    Outcome.UNEQUAL: "dim",
    Outcome.NOT_MEASURED: "dim",
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
        recipes: Only cells of these recipes; none is all.
        floats: Only cells of these float types; none is all.
        aims: What the cells together have to reach.
        section: What the section of the page is called.
        kind: The class of machine; by default that of this process.
        json: Where to write everything that was measured.
        resume: Keep the cells that ``json`` already has.
        page: A page with a section to write the tables into.
    """

    setting: Setting
    rounds: int
    patience: float
    cells: Sequence[Cell]
    models: Sequence[str] = ()
    recipes: Sequence[str] = ()
    floats: Sequence[str] = ()
    aims: tuple[Aim, ...] = ()
    section: str = "goals"
    kind: MachineClass = field(default_factory=MachineClass.here)
    json: Path | None = None
    resume: bool = False
    page: Path | None = None

    @property
    def chosen(self) -> list[Cell]:
        """The cells that were asked for."""
        return [
            cell
            for cell in self.cells
            if (not self.models or cell.case in self.models)
            and (not self.recipes or cell.recipe in self.recipes)
            and (not self.floats or cell.ours.float_type in self.floats)
        ]


def run_goals(run: GoalRun, console: Console) -> GoalResults:
    """Measure every cell, show the outcomes, and write the requested files."""
    outputs = Outputs(run.section, run.page, run.json, kind=run.kind)
    cells = run.chosen
    whole = tuple(run.cells)
    results = GoalResults(run.setting, run.rounds, (), _absent(cells), run.kind, run.aims, whole)
    if run.resume and run.json is not None:
        before = measured_before(run.json, results, whole)
        # Cells that were not asked for stay in the file, so that a run can be done in parts.
        kept = tuple(one for one in before if one.cell not in cells or _is_complete(one))
        cells = [cell for cell in cells if cell not in {one.cell for one in kept}]
        absent = _absent([*cells, *(one.cell for one in kept)])
        results = replace(results, cells=kept, absent=absent)
        if kept:
            outputs.write(results.to_dict(), results=results)
    steps = sum(1 + len(cell.ways) + run.rounds for cell in cells)
    with watching(console, steps) as watch:
        watch.say("building kernels and measuring speeds, once per machine")
        prepare_machine(run.setting.threads)
        for _, group in groupby(cells, key=lambda cell: (cell.case, cell.ours.float_type)):
            for measured in _measure(list(group), run, watch):
                # Keep the results so far, even if the rest fails.
                results = replace(results, cells=_in_order((*results.cells, measured), run))
                outputs.write(results.to_dict(), results=results)
    _show(results, console)
    return results


def _is_complete(result: CellResult) -> bool:
    """Whether all contenders took part: an engine may have been installed since."""
    present = {contender.name for contender in _present(result.cell)}
    return not result.reason and set(result.entries) == present


def _in_order(results: Sequence[CellResult], run: GoalRun) -> tuple[CellResult, ...]:
    return tuple(sorted(results, key=lambda one: run.cells.index(one.cell)))


def _absent(cells: Sequence[Cell]) -> dict[str, str]:
    engines = dict.fromkeys(way.engine for cell in cells for way in cell.ways)
    absent = {str(engine): reason for engine in engines if (reason := missing(engine))}
    return absent | kernels_lacking()


def _measure(cells: Sequence[Cell], run: GoalRun, watch: Watch) -> Iterator[CellResult]:
    """Measure cells of one model at one float type; its float contenders live on between them."""
    case = CASES[cells[0].case]
    reference = Contender(
        engine=Engine.EAGER, float_type=FloatType.F32, model=case.model, sizes=case.sizes
    )
    floats = {c.name: c for cell in cells for c in _present(cell) if c.recipe is None}
    inputs = example_inputs(case, case.seeds)
    with Comparison(inputs, reference.name, run.setting.threads, watch) as contest:
        try:
            contest.enter([reference.competitor(timed=False)])
        except WorkerError as error:
            yield from (CellResult(cell, {}, 0.0, str(error)) for cell in cells)
            return
        contest.enter([c.competitor() for c in floats.values()])
        for cell in cells:
            yield _measure_cell(cell, run, contest)


def _measure_cell(cell: Cell, run: GoalRun, contest: Comparison) -> CellResult:
    contenders = _present(cell)
    quantized = [(c, _eager(c, c.recipe)) for c in contenders if c.recipe is not None]
    eager = {e.name: e for _, e in quantized}
    contest.enter([e.competitor(timed=False) for e in eager.values()])
    contest.enter([c.competitor(like.name) for c, like in quantized])
    background = BackgroundLoad()
    entries = contest.run(run.rounds, cell.title, run.patience)
    others = background.share()
    contest.leave([*eager, *(c.name for c, _ in quantized)])
    found = {c.name: entries[c.name] for c in contenders}
    return CellResult(cell, found, others, unlimited=unlimited_engines(run.kind))


def _present(cell: Cell) -> list[Contender]:
    """Return the contenders of a cell whose engines are installed."""
    return [way.on(CASES[cell.case]) for way in cell.ways if not missing(way.engine)]


def _eager(contender: Contender, recipe: str) -> Contender:
    """Return the quantized model without a compiler, which shows what its bits are worth."""
    return eager_model(contender.model, contender.sizes, recipe, group_size=contender.group_size)


def _show(results: GoalResults, console: Console) -> None:
    console.print(_goals(results))
    console.print(_entries(results))
    for found in results.reached():
        style = _STYLE[found.outcome]
        ratio = words.ratio(found.ratio)
        line = f"{found.outcome}: {found.aim.name}: at most {found.aim.most:.2f}, {ratio}"
        console.print(escape(f"{line}; {found.text}"), style=style, highlight=False)
    console.print(f"class of machine: {results.kind.title}", highlight=False)
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
                f"{finding.bar.most:.2f}",
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
