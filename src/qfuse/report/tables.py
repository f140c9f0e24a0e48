"""The verbose report as `rich` tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qfuse.ir.events import NO_KERNELS, Lowered, Missed, Place
from qfuse.report.footnotes import Footnotes
from qfuse.report.screen import (
    action_lines,
    check_text,
    first_screen,
    line_text,
    why_none,
    worst_check,
)

if TYPE_CHECKING:
    from qfuse.report.report import Report

_MOST_ROWS = 40
_INDENT = "  "
_DOTS = "..."
_MOST_PATTERN_ROWS = 3


def render_verbose(report: Report) -> Iterator[Any]:
    """Yield the first screen, and then all parts of the report in full."""
    yield from first_screen(report)
    yield Text()
    yield from _actions(report)
    yield _summary(report)
    yield from _lowered(report)
    yield from _left(report)
    yield from _misses(report)
    yield from _trouble(report)


def _actions(report: Report) -> Iterator[Text]:
    if not report.actions:
        return
    yield Text("All things to do", "bold")
    for number, action in enumerate(report.actions, start=1):
        for line in action_lines(number, action, width=None):
            yield Text(line.text + line.tail, line.style)
        for place in action.places[1:]:
            yield Text(f"{_INDENT} also: {line_text(place)}", "cyan")
        if action.advice is not None:
            yield Text(f"{_INDENT} see {action.advice.link}", "dim")
    yield Text()


def _summary(report: Report) -> Table:
    table = Table(title="qfuse", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in report.facts.rows().items():
        table.add_row(name, escape(value))
    # Standalone passes do not lower, so their report has no kernels.
    lowered = report.facts.lowered
    if lowered:
        kernels = ", ".join(f"{count} x {name}" for name, count in sorted(report.kernels.items()))
        table.add_row("quantized ops", kernels or f"none: {why_none(report)}")
    fired = ", ".join(f"{name} {count}" for name, count in sorted(report.fired.items()))
    table.add_row("rules fired", fired or "none")
    if lowered:
        table.add_row("left as they are", f"{len(report.left)} quantize/dequantize")
    check = worst_check(report)
    if check is not None:
        table.add_row("values", check_text(check))
    return table


def _lowered(report: Report) -> Iterator[Any]:
    notes = Footnotes()
    groups: Counter[tuple[str, str, str, str]] = Counter()
    for event in (*report.fused, *report.in_float, *report.expanded, *report.refused):
        groups[_style(event), event.kernel, event.what, _why(event, notes)] += 1
    if not groups:
        return
    table = _table("Quantized ops", "count", "op", "kernel", "why this one")
    for (style, kernel, what, why), count in _top(groups):
        table.add_row(str(count), escape(what), Text(kernel, style), escape(why))
    yield table
    for line in notes.lines():
        yield Text(line, "dim")


def _style(event: Lowered) -> str:
    if event.failed:
        return "red"
    return "dim" if event.kernel in NO_KERNELS else "green"


def _why(event: Lowered, notes: Footnotes) -> str:
    parts = [event.why] if event.why else []
    # The reason of a float product has both times.
    if event.predicted is not None and event.rival_seconds is None:
        how = "measured" if event.measured else "predicted"
        parts.append(f"{how} {event.predicted * 1e6:.0f} us")
    if event.cause is None:
        parts += [f"{name}: {notes.mark(reason)}" for name, reason in event.losers]
    else:
        parts += [f"{one.label}: {notes.mark(reason)}" for one, reason in event.nearest]
    return "; ".join(parts)


def _left(report: Report) -> Iterator[Table]:
    missed = report.closest_at
    groups: Counter[tuple[str, str, str]] = Counter()
    first: dict[tuple[str, str, str], Place] = {}
    for event in report.left:
        miss = missed.get(event.place.node)
        key = event.place.op, event.reason, "" if miss is None else miss.told
        groups[key] += 1
        first.setdefault(key, event.place)
    if not groups:
        return
    columns = ("count", "op", "because", "rule that came closest", "for example")
    table = _table("Left as ops of their own", *columns)
    for key, count in _top(groups):
        op, reason, near = key
        table.add_row(str(count), op, escape(reason), escape(near), _where(first[key]))
    yield table


def _misses(report: Report) -> Iterator[Any]:
    groups: Counter[tuple[str, str, str]] = Counter()
    first: dict[tuple[str, str, str], Missed] = {}
    for miss in report.closest_misses:
        key = (miss.rule, miss.reason, miss.how_far)
        groups[key] += 1
        first.setdefault(key, miss)
    if not groups:
        return
    table = _table("Not fused", "count", "rule that came closest", "because", "for example")
    for key, count in _top(groups):
        because = f"{key[1]} ({key[2]})" if key[2] else key[1]
        table.add_row(str(count), key[0], escape(because), _where(first[key].anchor))
    yield table
    # Below the table: a cell is too narrow for them.
    shown = [_Pattern(first[key]) for key, _ in _top(groups) if first[key].pattern]
    if shown:
        yield Text("The part of a pattern that did not match", "italic")
        yield from shown


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The pattern of a miss with carets under the part that failed, in rows of the width."""

    miss: Missed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        width = options.max_width - len(_INDENT)
        yield Text(f"{self.miss.rule}: {self.miss.reason}")
        pattern, marks = self.miss.pattern.split("\n")
        for text, carets in _rows(pattern, marks, width):
            yield Text(_INDENT + text)
            if carets.strip():
                yield Text(_INDENT + carets, "red")


def _rows(text: str, carets: str, width: int) -> Iterator[tuple[str, str]]:
    """Yield the pattern in rows, each with its carets: at most three, around the first caret."""
    start = len(carets) - len(carets.lstrip())
    carets = carets.ljust(len(text))
    if len(text) > _MOST_PATTERN_ROWS * width:
        # From shortly before the carets, and not beyond the end.
        length = _MOST_PATTERN_ROWS * width - 2 * len(_DOTS)
        left = max(0, min(start - width // 2, len(text) - length))
        before, after = _DOTS * (left > 0), _DOTS * (left + length < len(text))
        text = before + text[left : left + length] + after
        carets = " " * len(before) + carets[left : left + length] + " " * len(after)
    while text:
        # A row ends with a word, where that leaves it more than half of the width.
        end = width if len(text) <= width else text.rfind(" ", width // 2, width) + 1 or width
        yield text[:end].rstrip(), carets[:end].rstrip()
        text, carets = text[end:], carets[end:]


def _trouble(report: Report) -> Iterator[Any]:
    for event in report.rolled_back:
        yield Text(f"rolled back {event.key}: {event.reason}", "bold red")
        if event.repro:
            yield Text(f"  to reproduce: {event.repro}", "red")
    places: dict[str, list[Place]] = {}
    for note in report.notes:
        if note.place and not note.warn:
            places.setdefault(note.text, []).append(note.place)
    for note in report.notes:
        if note.place is None or note.warn:
            where = f" ({note.place})" if note.place else ""
            mark = "warning" if note.warn else "note"
            yield Text(f"{mark}: {note.text}{where}", "yellow" if note.warn else "dim")
    for text, (first, *others) in places.items():
        more = f", and {len(others)} more" if others else ""
        yield Text(f"note: {text} ({first}{more})", "dim")


def _where(place: Place) -> str:
    return escape(place.module or place.source or f"%{place.node}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        justify = "right" if column == "count" else "left"
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _top(groups: Counter[Any]) -> list[tuple[Any, int]]:
    """Return the groups in order of appearance; only the most frequent if there are too many."""
    if len(groups) <= _MOST_ROWS:
        return list(groups.items())
    return groups.most_common(_MOST_ROWS)
