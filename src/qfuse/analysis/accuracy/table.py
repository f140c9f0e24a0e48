"""The accuracy of a model as `rich` tables, of 80 columns."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from qfuse.analysis.accuracy.closeness import Closeness, db_text
from qfuse.cost import seconds_text

if TYPE_CHECKING:
    from qfuse.analysis.accuracy.accuracy import Accuracy

_MOST_ROWS = 20


def render_accuracy(accuracy: Accuracy) -> Iterator[Any]:
    """Yield the parts: the outputs, the layers, what to keep in float."""
    runs = f"{accuracy.batches} batch{'es' * (accuracy.batches != 1)}"
    yield Text(f"Output, {runs}: quantization {_text(accuracy.output)};")
    yield Text(f"  the compiler adds {_text(accuracy.compiled_output)}")
    if accuracy.is_unrelated:
        most = max(layer.own.cosine for layer in accuracy.layers)
        yield Text(f"No layer gives what its float layer gives (cosine {most:.2f} at most):", "red")
        yield Text("is this float model the one that was quantized?", "red")
    if accuracy.layers:
        yield _layers(accuracy)
    rest = len(accuracy.layers) - _MOST_ROWS
    if rest > 0:
        yield Text(f"{rest} more layers are closer to the float model than these.", "dim")
    yield Text(f"{accuracy.unchanged} more modules compute as in float.", "dim")
    for step in accuracy.keep:
        sign = "+" if step.cost_us >= 0 else "-"
        gain = f"+{step.gain_db:.1f} dB" if step.gain_db < math.inf else "exact outputs"
        cost = f"{sign}{seconds_text(abs(step.cost_us) * 1e-6)}"
        text = f"{gain} for {cost} (output {db_text(step.output_db)} dB)"
        yield Text(f"keep {step.layer} in float: {text}", "green")
    for reason, count in Counter(reason for _, reason in accuracy.untried).items():
        layers = f"{count} layer{'s' * (count != 1)}"
        yield Text(f"{layers} not tried in float: {reason}", "yellow")


def _layers(accuracy: Accuracy) -> Table:
    shown = accuracy.layers[:_MOST_ROWS]
    start = _common_start([layer.layer for layer in shown])
    table = Table(title="Layers, worst first (SQNR in dB)", title_justify="left")
    table.add_column(f"layer (in {start.rstrip('.')})" if start else "layer", overflow="fold")
    for column in ("own", "total", "compiler", "cosine", "largest"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in shown:
        table.add_row(
            layer.layer.removeprefix(start) or "(model)",
            db_text(layer.own.sqnr_db),
            db_text(layer.total.sqnr_db),
            "-" if layer.compiled is None else db_text(layer.compiled.sqnr_db),
            f"{layer.own.cosine:.5f}",
            f"{layer.own.largest:.2g}",
        )
    return table


def _common_start(names: list[str]) -> str:
    """Return the modules that all names begin with, with a dot at the end."""
    if len(names) < 2:  # noqa: PLR2004
        return ""
    parents = [name.split(".")[:-1] for name in names]
    equal = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    return "".join(f"{parts[0]}." for parts in equal)


def _text(found: Closeness) -> str:
    if found.is_exact:
        return "nothing"
    return f"{db_text(found.sqnr_db)} dB, cosine {found.cosine:.5f}, largest {found.largest:.3g}"
