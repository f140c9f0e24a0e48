"""``python -m qfuse_bench.experiments.merge_sites``: which linears are merged.

Every merge site is compiled twice, its linears apart and as one, whatever the cost model decides;
both are timed in interleaved rounds, and the decision is compared with the clock. A decision counts
where there is a difference to be right about: more than 5 %, with an interval that excludes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qfuse import kernels
from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.cost import CostModel, load_or_measure
from qfuse.ir.errors import OptionsError
from qfuse.optimize.merge.merge_linears import MergeLinears, price
from qfuse.options import BuiltinBackend, choice
from qfuse.targets import Target
from qfuse_bench.harness.machine import BackgroundLoad, IdleWait, Setting
from qfuse_bench.harness.measure import LEAST_ROUNDS
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.peers.cases import pick
from qfuse_bench.report import format as words
from qfuse_bench.report.outputs import Outputs
from qfuse_bench.report.tables import ratio_text, setting_text
from qfuse_bench.workloads.measure_site import DIFFERENCE, Bench, Measured
from qfuse_bench.workloads.model_sites import sites_of
from qfuse_bench.workloads.site_grid import KINDS, ROWS, SITES, grid_inputs, site_graph

LEAST_RIGHT = 0.9
"""The part of the decisions that count which has to be right."""

_SECTION = "sites"
_BLOCK_SECONDS = 0.04
_QUICK = ("dynamic int8 f32", "bert-qkv")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteOptions:
    """What to measure.

    Attributes:
        kinds: Names out of :data:`qfuse_bench.workloads.site_grid.KINDS`; none is all.
        sites: Names out of :data:`qfuse_bench.workloads.site_grid.SITES`; none is all.
        rounds: Interleaved rounds per cell.
        threads: OpenMP threads; 0 takes torch's default.
        patience: Seconds to wait, in all, for other programs to leave the cores.
        backend: What runs the compiled sites.
        quick: One kind and one site.
        json: Where to write everything that was measured.
        page: A page with a section to write the table into.
    """

    kinds: tuple[str, ...] = field(
        default=(), metadata={"help": f"kinds of linears, out of {', '.join(KINDS)} [all]"}
    )
    sites: tuple[str, ...] = field(
        default=(), metadata={"help": f"merge sites, out of {', '.join(SITES)} [all]"}
    )
    rounds: int = field(default=15, metadata={"help": "interleaved rounds per cell"})
    threads: int = field(default=0, metadata={"help": "threads; 0 takes torch's default"})
    patience: float = field(
        default=300.0, metadata={"help": "seconds to wait, in all, for other programs to be quiet"}
    )
    backend: BuiltinBackend = field(
        default=BuiltinBackend.AUTO, metadata={"help": "what runs the compiled sites"}
    )
    quick: bool = field(default=False, metadata={"help": "one kind and one site only"})
    json: Path | None = field(
        default=None, metadata={"help": "write everything that was measured to a file"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )


@dataclass(frozen=True, slots=True)
class ModelSites:
    """A model whose merge sites are measured, instead of the built-in ones.

    Attributes:
        name: What the user calls it.
        model: A module, quantized or float, or an exported program.
        args: Example inputs.
        kwargs: Example inputs by keyword.
    """

    name: str
    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SiteResults:
    """A whole run.

    Attributes:
        setting: What it was measured on.
        rounds: Rounds per cell.
        rows: The cells.
        others: The fraction of the machine that was busy with other things meanwhile.
    """

    setting: Setting
    rounds: int
    rows: tuple[Measured, ...]
    others: float

    @property
    def counted(self) -> list[Measured]:
        """The cells with a difference to be right about."""
        return [row for row in self.rows if row.counts]

    @property
    def score(self) -> float | None:
        """The part of them in which the decision is right."""
        counted = self.counted
        return sum(row.right for row in counted) / len(counted) if counted else None

    @property
    def good(self) -> bool:
        """Whether that is enough."""
        return self.score is None or self.score >= LEAST_RIGHT

    def verdict(self) -> str:
        """Say what the rows come to."""
        counted = self.counted
        cells = f"{len(self.rows)} cells, of which {len(counted)} differ by more than"
        text = f"{cells} {DIFFERENCE:.0%} with an interval that excludes no difference"
        if self.score is None:
            return f"{text}: there is nothing to be right about."
        right = sum(row.right for row in counted)
        aim = f"the aim is at least {LEAST_RIGHT:.0%}"
        return f"{text}: the decision is right in {right} ({self.score:.0%}); {aim}."

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: everything that was measured, and the decisions."""
        return {
            "setting": asdict(self.setting),
            "rounds": self.rounds,
            "others": self.others,
            "score": self.score,
            "rows": [
                {
                    **asdict(row),
                    "decision": row.decision,
                    "ratio": asdict(row.ratio),
                    "counts": row.counts,
                    "right": row.right,
                }
                for row in self.rows
            ],
        }


def run_sites(
    options: SiteOptions, console: Console | None = None, model: ModelSites | None = None
) -> SiteResults:
    """Measure, show a table, and write what was asked for.

    Args:
        options: What to measure.
        console: Where to show it.
        model: Whose sites to measure, instead of the built-in ones.

    Raises:
        OptionsError: A kind, a site or a number does not exist.
        CaptureError: The model cannot be exported.
    """
    console = console or Console()
    _check(options)
    before = torch.get_num_threads()
    threads = options.threads or before
    torch.set_num_threads(threads)
    try:
        results = _measured(options, threads, console, model)
    finally:
        torch.set_num_threads(before)
    console.print(_table(results))
    console.print(setting_text(results.setting, results.rounds, results.others))
    console.print(results.verdict(), style="" if results.good else "bold red", highlight=False)
    return results


def _check(options: SiteOptions) -> None:
    if options.rounds < LEAST_ROUNDS:
        raise OptionsError(
            f"{options.rounds} rounds are too few", fix=f"ask for {LEAST_ROUNDS} or more"
        )
    if options.threads < 0:
        raise OptionsError(f"{options.threads} threads cannot be", fix="give 1, or 0")
    pick(options.kinds, KINDS, "kind")
    pick(options.sites, SITES, "site")


def _measured(
    options: SiteOptions, threads: int, console: Console, model: ModelSites | None
) -> SiteResults:
    outputs = Outputs(_SECTION, options.page, options.json)
    setting, background = Setting.here(threads), BackgroundLoad()
    rows: list[Measured] = []

    def results() -> SiteResults:
        return SiteResults(setting, options.rounds, tuple(rows), background.share())

    kinds, sites = _chosen(options)
    # How many sites a model has is known when it is captured.
    with watching(console, len(kinds) * len(sites) * len(ROWS) if model is None else 1) as watch:
        watch.say("building kernels and measuring speeds, once per machine")
        target = Target.detect(extensions=False)
        cost = CostModel(load_or_measure(target))
        bench = Bench(
            target, cost, kernels.load(), choice(BuiltinBackend, options.backend, "backend").value
        )
        patience = IdleWait(options.patience)
        found = (
            _grid(bench, options, patience, watch)
            if model is None
            else _model(bench, model, options, patience, watch)
        )
        for row in found:
            rows.append(row)
            # A whole run takes long: what is measured is kept.
            found_so_far = results()
            outputs.write(found_so_far.to_dict(), results=found_so_far)
    return results()


def _chosen(options: SiteOptions) -> tuple[list[str], list[str]]:
    if options.quick and not options.kinds and not options.sites:
        return [_QUICK[0]], [_QUICK[1]]
    return pick(options.kinds, KINDS, "kind"), pick(options.sites, SITES, "site")


def _grid(
    bench: Bench, options: SiteOptions, patience: IdleWait, watch: Watch
) -> Iterator[Measured]:
    kinds, sites = _chosen(options)
    for name in kinds:
        for site in map(SITES.__getitem__, sites):
            watch.say(f"compiling {name}, {site.name}")
            program = site_graph(site, KINDS[name], "m")
            (group,) = MergeLinears().groups(program)
            pair = bench.pair(program)
            watch.say(f"timing {name}, {site.name}")
            for m in ROWS:
                patience.wait()
                series = pair.run(grid_inputs(site, KINDS[name], m), options.rounds, _BLOCK_SECONDS)
                predicted = price(group, program, bench.cost, m)
                yield Measured(site.name, name, m, site.k, site.widths, predicted, *series)
                watch.advance()


def _model(
    bench: Bench, model: ModelSites, options: SiteOptions, patience: IdleWait, watch: Watch
) -> Iterator[Measured]:
    watch.say(f"capturing {model.name}")
    for site in sites_of(model.model, model.args, model.kwargs, bench.cost):
        watch.say(f"compiling {site.name}")
        pair = bench.pair(site.program)
        watch.say(f"timing {site.name}")
        patience.wait()
        series = pair.run(site.inputs(), options.rounds, _BLOCK_SECONDS)
        sizes = site.m, site.k, site.widths
        yield Measured(site.name, site.kind, *sizes, site.predicted, *series, site.count)


def _table(results: SiteResults) -> Table:
    table = Table(
        title="Linears apart and merged; ratio: merged / apart, 95 % interval", title_justify="left"
    )
    for column in ("site", "linears"):
        table.add_column(column, min_width=12, overflow="fold")
    for column in ("M", "K", "N", "predicted", "apart ms", "merged ms", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("decision")
    for row in results.rows:
        table.add_row(*_cells(row), _decision(row))
    return table


def _cells(row: Measured) -> Sequence[str | Text]:
    before, after = row.predicted.before.hint, row.predicted.after.hint
    return (
        row.site if row.count == 1 else f"{row.site} ({row.count} alike)",
        row.kind,
        str(row.m),
        str(row.k),
        " + ".join(map(str, row.widths)),
        f"{after / before:.2f}",
        words.milliseconds(row.apart.median),
        words.milliseconds(row.merged.median),
        ratio_text(row.ratio),
    )


def _decision(row: Measured) -> Text:
    name = "merge" if row.decision else "leave apart"
    if not row.counts:
        return Text(name, "dim")
    return Text(name, "green") if row.right else Text(f"{name}: WRONG", "bold red")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(SiteOptions)
def main(**given: Any) -> None:
    """Measure merge sites, and whether the decisions to merge are right."""
    with exit_on_error():
        run_sites(SiteOptions(**given))


if __name__ == "__main__":
    main()
