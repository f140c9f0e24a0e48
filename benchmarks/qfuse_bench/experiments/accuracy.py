"""``python -m qfuse_bench.experiments.accuracy``: accuracy and time of a network trained here.

A small convolutional network is trained on handwritten digits in a few seconds, quantized through
PT2E, and compiled. Accuracy is measured on images that neither training nor calibration has seen,
and the time of a call in interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from qfuse_bench.harness._torch_api import compile_frozen, register_peer_patterns
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.measure import LEAST_ROUNDS, Series, measure
from qfuse_bench.harness.worker import time_calls
from qfuse_bench.report.outputs import Outputs
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
        rounds: Interleaved rounds of timing; without any, only the accuracy is measured, and
            Inductor is not run.
        batch: Images per timed call.
        page: A page with a section to write the table into.
    """

    steps: int = field(default=400, metadata={"help": "steps of training"})
    seed: int = field(default=0, metadata={"help": "seed of the weights and of the batches"})
    backend: BuiltinBackend = field(
        default=BuiltinBackend.AUTO, metadata={"help": "what runs the compiled model"}
    )
    rounds: int = field(
        default=21, metadata={"help": "interleaved rounds of timing; 0 measures accuracy alone"}
    )
    batch: int = field(default=64, metadata={"help": "images per timed call"})
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
        time: The times of its calls; ``None`` if it was not timed.
    """

    name: str
    right: int
    like_float: int
    images: int
    time: Series | None = None

    @property
    def milliseconds(self) -> str:
        """Median of a call, in words."""
        return "-" if self.time is None else f"{1e3 * self.time.median:.3g}"


@dataclass(frozen=True, slots=True)
class AccuracyResults:
    """All models.

    Attributes:
        rows: The float model, the quantized one, that compiled with qfuse, and if there was timing,
            both models under Inductor.
        changed: Images for which compiling changed the prediction.
        report: What qfuse did.
    """

    rows: tuple[Accuracy, ...]
    changed: int
    report: qfuse.Report


def run_accuracy(options: AccuracyOptions, console: Console) -> AccuracyResults:
    """Train, quantize, compile, and show a table.

    Raises:
        OptionsError: A number is too small.
    """
    _check(options)
    outputs = Outputs(_SECTION, options.page)
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
    if options.rounds:
        register_peer_patterns()
        named["float, Inductor"] = compile_frozen(model)
        named["int8, PT2E, Inductor"] = compile_frozen(quantized)
    found = {name: predict(call, unseen) for name, call in named.items()}
    times = _times(named, unseen.part(0, options.batch), options.rounds)
    first, second, third = list(found.values())[:3]
    rows = tuple(
        Accuracy(
            name,
            _equal(labels, unseen.labels),
            _equal(labels, first),
            len(unseen),
            times.get(name),
        )
        for name, labels in found.items()
    )
    results = AccuracyResults(rows, len(unseen) - _equal(second, third), fast.report)
    console.print(_table(results, options))
    here = Setting.here(torch.get_num_threads())
    outputs.write(results=results, setting=here, options=options)
    return results


def _check(options: AccuracyOptions) -> None:
    if options.steps < 1:
        raise OptionsError(f"{options.steps} steps train nothing", fix="ask for at least 1")
    if options.rounds and options.rounds < LEAST_ROUNDS:
        raise OptionsError(
            f"{options.rounds} rounds are too few", fix=f"ask for 0 or at least {LEAST_ROUNDS}"
        )
    if options.batch < 1:
        raise OptionsError(f"{options.batch} images cannot be timed", fix="ask for at least 1")


@dataclass(frozen=True, slots=True)
class _Timed:
    """A model with the images of a call."""

    call: Callable[..., Any]
    images: torch.Tensor

    def time_block(self, calls: int) -> list[float]:
        """Return the seconds of each call."""
        with torch.no_grad():
            return time_calls(self.call, ((self.images,), {}), calls)


def _times(
    named: Mapping[str, Callable[..., Any]], images: Images, rounds: int
) -> dict[str, Series]:
    if not rounds:
        return {}
    return measure({name: _Timed(call, images.pixels) for name, call in named.items()}, rounds)


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
    for column in ("accuracy", "right", "as the float model", "ms"):
        table.add_column(column, justify="right")
    for row in results.rows:
        share, right = f"{row.right / row.images:.2%}", f"{row.right} of {row.images}"
        like = f"{row.like_float / row.images:.2%}"
        table.add_row(row.name, share, right, like, row.milliseconds)
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(AccuracyOptions)
def main(**given: Any) -> None:
    """Train a small network on digits; show accuracy and time in float, quantized, compiled."""
    with exit_on_error():
        run_accuracy(AccuracyOptions(**given), Console())


if __name__ == "__main__":
    main()
