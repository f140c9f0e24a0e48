"""The findings of the lint as text, equal ones together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from qfuse.analysis.placement.finding import LintFinding, Severity, cost_text
from qfuse.report.screen import line_text

_STYLES = {Severity.WARNING: "yellow", Severity.INFO: "dim"}
_MOST_PLACES = 3


def lint_table(findings: Sequence[LintFinding]) -> Group:
    """Return one paragraph per kind of finding and change, with the first places of each."""
    if not findings:
        return Group(Text("no findings: nothing to change in the quantization", "green"))
    kinds: dict[tuple[str, str], list[LintFinding]] = {}
    for finding in findings:
        # What to change names numbers of its place for some checks, so the code alone counts.
        kinds.setdefault((str(finding.severity), finding.code), []).append(finding)
    lines = [line for group in kinds.values() for line in _paragraph(group)]
    counts = ", ".join(
        f"{count} {severity}{'s' * (count != 1 and severity is Severity.WARNING)}"
        for severity in Severity
        if (count := sum(f.severity is severity for f in findings))
    )
    return Group(*lines, Text(counts, "bold"))


def _paragraph(group: Sequence[LintFinding]) -> list[RenderableType]:
    first = group[0]
    known = [f.predicted_us for f in group if f.predicted_us is not None]
    lost = [f.lost_db for f in group if f.lost_db is not None]
    cost = cost_text(sum(known) if known else None, max(lost, default=None))
    cost = f", {cost}" if cost else ""
    times = f"{len(group)} x " if len(group) > 1 else ""
    title = Text(f"{times}{first.code}{cost}", f"bold {_STYLES[first.severity]}")
    lines: list[RenderableType] = [title]
    for finding in group[:_MOST_PLACES]:
        lines.append(_indented(f"{_where(finding)}: {finding.seen}", 2))
        if finding is first or finding.fix != first.fix:
            lines.append(_indented(f"do: {finding.fix}", 4, "green"))
    if len(group) > _MOST_PLACES:
        lines.append(Text(f"  and {len(group) - _MOST_PLACES} more; --json lists all", "dim"))
    return lines


def _indented(text: str, by: int, style: str = "") -> Padding:
    return Padding(Text(text, style), (0, 0, 0, by))


def _where(finding: LintFinding) -> str:
    place = finding.place
    # The module tells where a file is.
    line = line_text(replace(place, module="")) if place.source else ""
    parts = [part for part in (place.module, line) if part]
    return " at ".join(parts) or f"%{place.node}"
