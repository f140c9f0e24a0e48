"""The first screen of a report: a verdict, what to do, and what else can be shown."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.text import Text

from qfuse.cost import seconds_text
from qfuse.ir.events import Checked, Place
from qfuse.report.actions import Action

if TYPE_CHECKING:
    from qfuse.report.report import Report

LINES = 24
"""Lines of a terminal; the prompt takes the last one."""

COLUMNS = 80
_MOST_ACTIONS = 5
_INDENT = "   "
_LEAST_ERROR = 0.1
_LEAST_CODE = 12


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the first screen.

    Attributes:
        text: What is cut, or takes a second line, if it is too long.
        style: As of ``rich``.
        tail: An end that is never cut.
    """

    text: str
    style: str = ""
    tail: str = ""

    def parts(self, rows: int) -> list[str]:
        """Return the line in at most so many lines of 80 columns."""
        whole = self.text + self.tail
        if len(whole) <= COLUMNS or rows == 1:
            return [cut(self.text, COLUMNS - len(self.tail)) + self.tail]
        first = textwrap.wrap(self.text, COLUMNS)[0] if self.text.strip() else ""
        rest = f"{_INDENT}  {self.text[len(first) :].strip()}"
        return [first, *Line(rest, tail=self.tail).parts(1)]


def first_screen(report: Report) -> Iterator[Text]:
    """Yield at most 23 lines of at most 80 columns, most important first.

    A sentence that is too long takes a second line if lines are left, the first ones first.
    """
    lines = list(_lines(report))
    left = LINES - 1 - len(lines)
    for line in lines:
        parts = line.parts(2 if left > 0 else 1)
        left -= len(parts) - 1
        yield from (Text(part, line.style) for part in parts)


def cut(line: str, width: int = COLUMNS) -> str:
    """Return a line of at most ``width`` columns."""
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."


def why_none(report: Report) -> str:
    """Return why nothing runs on a quantized kernel."""
    warned = any(note.stage == "normalize" and note.warn for note in report.notes)
    # Misses do not tell: rules also decline at the linears of a float model.
    reasons = (
        (report.in_float, "they run in float, which is faster"),
        (
            report.rolled_back and report.expanded,
            "the rewrites of the quantized ops were undone, see below",
        ),
        (
            any(op.failed for op in report.expanded),
            "no kernel takes the quantized ops, see below",
        ),
        (
            any(not left.needed for left in report.left),
            "the quantized ops could not be fused, see below",
        ),
        (report.left, "nothing quantized is multiplied"),
        (warned, "the quantized ops are not supported, see the warnings below"),
    )
    unknown = "the model is not quantized, or its quantization was not recognized"
    return next((why for holds, why in reasons if holds), unknown)


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
    return f"{text} (error: {_times(check.error)} x the source's rounding error; {limit})"


def _times(error: float) -> str:
    # More digits say nothing, and do not fit the line.
    return f"<{_LEAST_ERROR}" if 0 < error < _LEAST_ERROR else f"{error:.2g}"


def line_text(place: Place, width: int | None = None) -> str:
    """Return the user's line with the name of its file, and the module.

    Args:
        place: The place.
        width: If the text is wider, the code is cut: the module is what tells layers apart.
    """
    module = f"  [{place.module}]" if place.module else ""
    if not place.source:
        return module.strip() or f"%{place.node} ({place.op})"
    path, _, rest = place.source.partition(":")
    number, _, code = rest.partition(": ")
    line = f"{PurePath(path).name}:{number}"
    code = f": {code}" if code else ""
    if width is None or len(line + code + module) <= width:
        return line + code + module
    left = width - len(line + module)
    code = cut(code, left) if left > _LEAST_CODE else ""
    # Of a module that is too long itself, the end differs between layers.
    cut_off = len(line + code + module) - width
    return line + code + (module if cut_off <= 0 else f"  [...{module[cut_off + 6 :]}")


def _lines(report: Report) -> Iterator[Line]:
    for line in verdict_lines(report):
        yield Line(line, "bold")
    check = worst_check(report)
    if check is not None:
        yield Line(f"values: {check_text(check)}", "" if check.passed else "bold red")
    actions = report.actions
    # Nothing can be done about a reason that costs nothing known and that nothing helps against.
    useful = [action for action in actions if action.is_useful]
    if useful:
        yield Line("")
        # The second line of a long verdict takes the place of an action.
        shown = useful[: _MOST_ACTIONS - len(verdict_lines(report)) + 1]
        rest = len(actions) - len(shown)
        more = f" ({rest} more with --verbose)" if rest else ""
        yield Line(f"To do, by what it costs here per call{more}:", "bold")
        for number, action in enumerate(shown, start=1):
            yield from action_lines(number, action)
    yield from (Line(line, "dim") for line in _more(report))


def action_lines(number: int, action: Action, width: int | None = COLUMNS) -> Iterator[Line]:
    """Yield the three lines of an action: what it costs and why, where, what to do."""
    cost = "" if action.seconds is None else f"{seconds_text(action.seconds)}  "
    count = len(action.places)
    times = f" ({count} places)" if count > 1 else ""
    yield Line(f"{number}. {cost}{action.tried}: {action.reason}", tail=times)
    if action.places:
        left = None if width is None else width - len(_INDENT)
        yield Line(f"{_INDENT}{line_text(action.places[0], left)}", "cyan")
    if action.advice is not None:
        yield Line(f"{_INDENT}do: {action.advice.do}", "green")


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
    kernels = len(report.fused)
    if kernels:
        products = "no product" if share is None else f"0 of {share.products} products"
        return f"{_count(kernels, 'quantized op')} on kernels, {products} among them"
    return f"quantized ops: none: {why_none(report)}"


def _more(report: Report) -> Iterator[str]:
    """Yield one line for each part of the verbose report."""
    ops, kinds = len(report.fused), len({event.kernel for event in report.fused})
    yield "With --verbose, or report.text(verbose=True): machine, versions, times, and"
    if ops or report.expanded or report.in_float:
        what = f"{_count(ops, 'quantized op')} on {_count(kinds, 'kernel')}"
        if report.in_float:
            what += f", {len(report.in_float)} in float, which is faster"
        yield f"{_INDENT}{what}, {len(report.expanded)} expanded, each with its alternatives"
    if report.left:
        yield f"{_INDENT}{_count(len(report.left), 'quantize or dequantize op')} left, and why"
    if report.closest_misses:
        nodes = _count(len(report.closest_misses), "node")
        yield f"{_INDENT}{nodes} not fused, with the rule that came closest"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
