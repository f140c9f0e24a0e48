"""``python -m qfuse_bench.experiments.page_time``: what the HTML page of a report costs.

Headless Chromium opens pages of 5 and 5,000 sites, filters their tables and selects a row, and
measures that inside of the page. The second table is what snapshots of the stages add to planning,
in CPU seconds of one process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from qfuse import kernels, zoo
from qfuse.capture import capture
from qfuse.cli.errors import exit_on_error
from qfuse.cost import CostModel, load_or_measure
from qfuse.ir.errors import OptionsError
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.pipeline import Pipeline
from qfuse.report.page import page_html
from qfuse.snapshots import StageRecorder
from qfuse.targets import Target
from qfuse.zoo import recipes
from qfuse_bench.harness.browser import Browser, chromium
from qfuse_bench.harness.stats import median
from qfuse_bench.workloads.report_pages import many_sites

SIZES = (5, 5000)
OPEN_SECONDS, FILTER_SECONDS, SNAPSHOT_SHARE = 2.0, 0.1, 0.05
"""The limits."""

_MODELS = ("bert", "resnet18")
_WORDS = ("layer_12", "layer_123 scale", "linear", "")
_OPENED = "performance.getEntriesByType('navigation')[0].domComplete / 1e3"
_FILTER = """(() => {
  const box = document.getElementById("search"), begin = performance.now();
  box.value = WORDS;
  box.dispatchEvent(new Event("input"));
  document.body.offsetHeight;
  return (performance.now() - begin) / 1e3;
})()"""
_SELECT = """(() => {
  const begin = performance.now();
  document.querySelector("#rows [data-row]").click();
  document.body.offsetHeight;
  return (performance.now() - begin) / 1e3;
})()"""


def _page_table(rounds: int) -> Table:
    table = Table(title="Page in headless Chromium, medians", title_justify="left")
    for name in ("sites", "made", "size", "opens", "filters", "selects"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        for count in SIZES:
            report, profile = many_sites(count)
            begin = time.process_time()
            page = page_html(report, profile)
            made = time.process_time() - begin
            file = Path(folder, f"{count}.html")
            file.write_text(page, encoding="utf-8")
            opened, filtered, selected = list[float](), list[float](), list[float]()
            for _ in range(rounds):
                browser.open(file)
                opened.append(browser.eval(_OPENED))
                filtered += [browser.eval(_FILTER.replace("WORDS", repr(w))) for w in _WORDS]
                selected.append(browser.eval(_SELECT))
            table.add_row(
                f"{count:,}",
                f"{made:.2f} s",
                f"{len(page) / 1e6:.1f} MB",
                f"{median(opened):.2f} s",
                f"{median(filtered) * 1e3:.0f} ms",
                f"{median(selected) * 1e3:.0f} ms",
            )
            _judge(f"opening {count} sites", median(opened), OPEN_SECONDS)
            _judge(f"filtering {count} sites", median(filtered), FILTER_SECONDS)
    return table


def _snapshot_table(rounds: int) -> Table:
    table = Table(title="CPU seconds of planning", title_justify="left")
    for name in ("model", "planning", "snapshots", "share"):
        table.add_column(name, justify="right")
    target = Target.detect(extensions=False)
    pipeline = Pipeline(target, CostModel(load_or_measure(target)), kernels.load())
    for name in _MODELS:
        made = zoo.build(name)
        recipe = "w8a8-dynamic" if name == "bert" else "w8a8-static"
        kwargs = dict(made.kwargs or {})
        model = recipes.quantize(made.module, recipe, made.args, kwargs).model
        captured = capture(model, made.args, kwargs)
        plans, shots = list[float](), list[float]()
        for _ in range(rounds):
            spent = _Spent(StageRecorder())
            begin = time.process_time()
            pipeline.rewrite(captured, (), None, spent)
            plans.append(time.process_time() - begin - spent.seconds)
            shots.append(spent.seconds)
        share = median(shots) / median(plans)
        row = f"{median(plans):.2f} s", f"{median(shots) * 1e3:.1f} ms", f"{share:.1%}"
        table.add_row(name, *row)
        _judge(f"snapshots of {name}", share, SNAPSHOT_SHARE)
    return table


class _Spent:
    """Counts the CPU seconds of a function."""

    def __init__(self, function: Callable[[StageGraph], None]) -> None:
        self.seconds = 0.0
        self._function = function

    def __call__(self, program: StageGraph) -> None:
        begin = time.process_time()
        self._function(program)
        self.seconds += time.process_time() - begin


def _judge(what: str, found: float, most: float) -> None:
    if found > most:
        Console(stderr=True).print(f"{what}: {found:.3g} exceeds {most:.3g}", style="red")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=5, show_default=True, help="rounds per measurement")
def main(rounds: int) -> None:
    """Measure how fast the page of a report opens, and what it costs to prepare."""
    with exit_on_error():
        if chromium() is None:
            raise OptionsError("there is no Chromium", fix="install it: apt-get install chromium")
        console = Console()
        console.print(_page_table(rounds))
        console.print(_snapshot_table(rounds))


if __name__ == "__main__":
    main()
