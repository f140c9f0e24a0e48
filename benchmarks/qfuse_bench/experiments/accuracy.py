"""``python -m qfuse_bench.experiments.accuracy``: what quantizing and compiling cost in accuracy.

A small convolutional network is trained on handwritten digits in a few seconds, quantized through
PT2E, and compiled with qfuse. The accuracy of all three is measured on images that none of them has
seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.export import Dim

import qfuse
from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse.options import BuiltinBackend
from qfuse.zoo import recipes
from qfuse_bench.harness.machine import Setting
from qfuse_bench.report.markdown import write_section
from qfuse_bench.workloads.digits import Images, predict, read_digits, train

_SECTION = "accuracy"
_CALIBRATION = 256
_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyOptions:
    """What to do.

    Attributes:
        steps: Steps of training.
        seed: Seed of the weights and of the batches.
        backend: What runs the compiled model.
        page: A page with a section to write the table into.
    """

    steps: int = field(default=400, metadata={"help": "steps of training"})
    seed: int = field(default=0, metadata={"help": "seed of the weights and of the batches"})
    backend: BuiltinBackend = field(
        default=BuiltinBackend.AUTO, metadata={"help": "what runs the compiled model"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The predictions of one model.

    Attributes:
        name: The model.
        right: Images whose class it predicts.
        like_float: Images for which it predicts what the float model predicts.
        images: Images in all.
    """

    name: str
    right: int
    like_float: int
    images: int


@dataclass(frozen=True, slots=True)
class AccuracyResults:
    """The three models.

    Attributes:
        rows: The float model, the quantized one, and that compiled with qfuse.
        changed: Images for which compiling changed the prediction.
        report: What qfuse did.
    """

    rows: tuple[Accuracy, ...]
    changed: int
    report: qfuse.Report


def run_accuracy(options: AccuracyOptions, console: Console) -> AccuracyResults:
    """Train, quantize, compile, and show a table.

    Raises:
        OptionsError: The number of steps is too small.
    """
    if options.steps < 1:
        raise OptionsError(f"{options.steps} steps train nothing", fix="ask for at least 1")
    seen, unseen = read_digits()
    model = train(seen, options.steps, options.seed)
    quantized = _quantized(model, seen)
    fast = qfuse.compile(
        quantized,
        (unseen.pixels[:_CALIBRATION],),
        dynamic_shapes=_shapes(),
        options={"backend": options.backend},
    )
    named: dict[str, Callable[..., Any]] = {
        "float": model,
        "int8, PT2E": quantized,
        "int8, PT2E, qfuse": fast,
    }
    found = {name: predict(call, unseen) for name, call in named.items()}
    first, second, third = found.values()
    rows = tuple(
        Accuracy(name, _equal(labels, unseen.labels), _equal(labels, first), len(unseen))
        for name, labels in found.items()
    )
    results = AccuracyResults(rows, len(unseen) - _equal(second, third), fast.report)
    console.print(_table(results, options))
    if options.page is not None:
        here = Setting.here(torch.get_num_threads())
        write_section(options.page, _SECTION, results=results, setting=here, steps=options.steps)
    return results


def _quantized(model: torch.nn.Module, images: Images) -> torch.nn.Module:
    some = images.part(0, _CALIBRATION).pixels
    return recipes.quantize(model, "w8a8-static", (some,), {}, _shapes()).model


def _shapes() -> dict[str, dict[int, Any]]:
    return {"images": {0: Dim("batch", min=1, max=_MOST)}}


def _equal(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a == b).sum())


def _table(results: AccuracyResults, options: AccuracyOptions) -> Table:
    title = f"Handwritten digits, {options.steps} steps of training, unseen images"
    caption = f"compiling changed {results.changed} of {results.rows[0].images} predictions"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("model")
    for column in ("accuracy", "right", "as the float model"):
        table.add_column(column, justify="right")
    for row in results.rows:
        share, right = f"{row.right / row.images:.2%}", f"{row.right} of {row.images}"
        table.add_row(row.name, share, right, f"{row.like_float / row.images:.2%}")
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(AccuracyOptions)
def main(**given: Any) -> None:
    """Train a small network on digits; show its accuracy in float, quantized, and compiled."""
    with exit_on_error():
        run_accuracy(AccuracyOptions(**given), Console())


if __name__ == "__main__":
    main()
