"""The first screen of a report: a verdict, what to do, and what else can be shown."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.text import Text

from qfuse.cost import seconds_text
from qfuse.ir.events import Checked, Place
from qfuse.report.actions import Action

if TYPE_CHECKING:
    from qfuse.report.report import Report

LINES = 24
COLUMNS = 80
_MOST_ACTIONS = 5
_INDENT = "   "
_LEAST_ERROR = 0.1


def first_screen(report: Report) -> Iterator[Text]:
    """Yield at most 24 lines of at most 80 columns, most important first."""
    for line, style in _lines(report):
        yield Text(cut(line), style)


def cut(line: str, width: int = COLUMNS) -> str:
    """Return a line of at most ``width`` columns."""
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."


def why_none(report: Report) -> str:
    """Return why nothing runs on a quantized kernel."""
    # Misses do not tell: rules also decline at the linears of a float model.
    if report.left:
        return "the quantized ops could not be fused, see below"
    if any(note.stage == "normalize" and note.warn for note in report.notes):
        return "the quantized ops are not supported, see the warnings below"
    return "the model is not quantized, or its quantization was not recognized"


def worst_check(report: Report) -> Checked | None:
    """Return the check of the values of the whole model that came closest to its bound.

    The graph is checked, and then the code that was compiled from it. Code that fails is not used,
    which is a warning: then the check of the graph is that of what runs.
    """
    graph = [check for check in report.checks if check.what == "model"]
    code = [check for check in report.checks if check.what == "compiled" and check.passed]
    return max((*graph, *code), key=_share, default=None)


def _share(check: Checked) -> float:
    if not check.passed:
        return math.inf
    return check.error / check.allowed if check.allowed else 0.0


def check_text(check: Checked) -> str:
    """Return the outcome of a value check, with its error in rounding errors of the source."""
    text = "passed" if check.passed else f"FAILED: {check.note}"
    if not check.allowed:
        return f"{text} (the same bits)" if check.passed else text
    limit = f"up to {check.allowed:.2g} x passes"
    return f"{text} (error: {_times(check.error)} x the source's own rounding error; {limit})"


def _times(error: float) -> str:
    # More digits say nothing, and do not fit the line.
    return f"<{_LEAST_ERROR}" if 0 < error < _LEAST_ERROR else f"{error:.2g}"


def line_text(place: Place) -> str:
    """Return the user's line with the name of its file, and the module."""
    line = place.source
    if line:
        path, colon, rest = line.partition(":")
        line = f"{PurePath(path).name}{colon}{rest}"
    module = f"[{place.module}]" if place.module else ""
    return "  ".join(filter(None, (line, module))) or f"%{place.node} ({place.op})"


def _lines(report: Report) -> Iterator[tuple[str, str]]:
    for line in verdict_lines(report):
        yield line, "bold"
    check = worst_check(report)
    if check is not None:
        yield f"values: {check_text(check)}", "" if check.passed else "bold red"
    actions = report.actions
    # Nothing can be done about a reason that costs nothing known and that nothing helps against.
    useful = [action for action in actions if action.is_useful]
    if useful:
        yield "", ""
        # The second line of a long verdict takes the place of an action.
        shown = useful[: _MOST_ACTIONS - len(verdict_lines(report)) + 1]
        rest = len(actions) - len(shown)
        more = f" ({rest} more with --verbose)" if rest else ""
        yield f"To do, by what it costs here per call{more}:", "bold"
        for number, action in enumerate(shown, start=1):
            yield from action_lines(number, action)
    yield from ((line, "dim") for line in _more(report))


def action_lines(
    number: int, action: Action, width: int | None = COLUMNS
) -> Iterator[tuple[str, str]]:
    """Yield the three lines of an action: what it costs and why, where, what to do."""
    cost = "" if action.seconds is None else f"{seconds_text(action.seconds)}  "
    count = len(action.places)
    times = f" ({count} places)" if count > 1 else ""
    head, reason = f"{number}. {cost}", f"{action.tried}: {action.reason}"
    # The number of places is more than the end of a long reason.
    if width is not None:
        reason = cut(reason, width - len(head) - len(times))
    yield head + reason + times, ""
    if action.places:
        yield f"{_INDENT}{line_text(action.places[0])}", "cyan"
    if action.advice is not None:
        yield f"{_INDENT}do: {action.advice.do}", "green"


def verdict_lines(report: Report) -> list[str]:
    """Return the verdict in one line of 80 columns, or in two."""
    text = verdict(report)
    if len(text) <= COLUMNS:
        return [text]
    head, _, tail = text.partition("; ")
    return [head, tail] if tail else [text]


def verdict(report: Report) -> str:
    """Return in one sentence what was achieved."""
    share = report.work
    if not report.facts.lowered:
        fired = ", ".join(f"{name} {count}" for name, count in sorted(report.fired.items()))
        return f"rules fired: {fired or 'none'}"
    if share is not None and share.quantized_products:
        return str(share)
    kernels = sum(report.kernels.values()) - len(report.expanded)
    if kernels:
        products = "no product" if share is None else f"0 of {share.products} products"
        return f"{_count(kernels, 'quantized op')} on kernels, {products} among them"
    return f"quantized ops: none: {why_none(report)}"


def _more(report: Report) -> Iterator[str]:
    """Yield one line for each part of the verbose report."""
    ops, kinds = len(report.fused), len({event.kernel for event in report.fused})
    yield "With --verbose, or report.text(verbose=True): machine, versions, times, and"
    if ops or report.expanded:
        what = f"{_count(ops, 'quantized op')} on {_count(kinds, 'kernel')}"
        yield f"{_INDENT}{what}, {len(report.expanded)} expanded, each with its alternatives"
    if report.left:
        yield f"{_INDENT}{_count(len(report.left), 'quantize or dequantize op')} left, and why"
    if report.closest_misses:
        nodes = _count(len(report.closest_misses), "node")
        yield f"{_INDENT}{nodes} not fused, with the rule that came closest"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
