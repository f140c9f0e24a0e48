"""``qfuse doctor MODEL``: what keeps a model from its speed on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from rich.console import Console
from rich.text import Text

import qfuse
from qfuse.cli.console import show_progress
from qfuse.report import Report
from qfuse.report.preflight import ModelFinding, preflight
from qfuse.targets import Level, Target, diagnose

_STYLE = {Level.OK: "green", Level.WARN: "yellow", Level.BAD: "red"}

Explain = Callable[[Target, Callable[[str], None]], Report]


def show_preflight(explain: Explain, out: Console, *, as_json: bool) -> None:
    """Explain a model on this machine, and print what costs it time and what to do."""
    target = Target.detect()
    with show_progress() as say:
        report = explain(target, say)
    found = preflight(report, diagnose(target), target)
    if as_json:
        click.echo(json.dumps(_data(report, found), indent=2, default=str))
        return
    for line in _lines(report, found):
        out.print(line)


def explained(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: Any,
) -> Explain:
    """Return a function that explains a model on a target, and tells the steps."""
    return lambda target, say: qfuse.explain(
        model, args, kwargs, dynamic_shapes=shapes, target=target, progress=say
    )


def _data(report: Report, found: Sequence[ModelFinding]) -> dict[str, Any]:
    return {"work": report.to_dict()["work"], "findings": [one.to_dict() for one in found]}


def _lines(report: Report, found: Sequence[ModelFinding]) -> Iterator[Text]:
    yield Text("no products" if report.work is None else str(report.work), "bold")
    for one in found:
        if one.costs_nothing:
            continue
        mark = (f"{one.level.value:4} ", _STYLE[one.level])
        yield Text.assemble(mark, (one.what, "bold"), f": {one.detail}")
        yield Text(f"     costs here: {one.cost}")
        if one.fix:
            yield Text(f"     do: {one.fix}", "green")
    free = [one.what for one in found if one.costs_nothing]
    if free:
        yield Text(f"costs nothing here, see qfuse doctor: {'; '.join(free)}", "dim")
    if report.actions:
        yield Text(f"{len(report.actions)} to do in the model itself: see qfuse explain")
