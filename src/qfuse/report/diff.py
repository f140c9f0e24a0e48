"""The difference of two reports: what lost its kernel, what gained one, and which facts differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from qfuse.ir.events import NO_KERNELS, Estimated, Left, Lowered, Place
from qfuse.ir.units import seconds_text
from qfuse.report.data import Recorded
from qfuse.report.work import work_share

# They differ between any two runs, and say nothing about the model.
_OF_A_RUN = {"created", "capture", "plan", "compile", "source call", "compiled call"}
_FLOAT = "float"
FACTOR = 1.05
"""Predictions that differ by less are equal."""


@dataclass(frozen=True, slots=True)
class OpRun:
    """What runs one op: the name of a kernel, or ``float``."""

    place: Place
    kernel: str


@dataclass(frozen=True, slots=True)
class OpChange:
    """An op that two reports run differently."""

    before: OpRun
    after: OpRun


@dataclass(frozen=True, slots=True)
class ReportDiff:
    """What differs between two reports.

    Attributes:
        lost: Ops that ran on a kernel and run in float.
        gained: Ops that ran in float and run on a kernel.
        moved: Ops on another kernel than before.
        removed: Ops that only the first report has.
        added: Ops that only the second report has.
        left: Number of quantize and dequantize ops left, before and after.
        predicted_seconds: Predicted seconds of the products, before and after, where known.
        facts: Facts that differ, by name, before and after.
        regressions: Why the second report is worse; empty if it is not.
    """

    lost: tuple[OpChange, ...]
    gained: tuple[OpChange, ...]
    moved: tuple[OpChange, ...]
    removed: tuple[OpRun, ...]
    added: tuple[OpRun, ...]
    left: tuple[int, int]
    predicted_seconds: tuple[float | None, float | None]
    facts: dict[str, tuple[str, str]]
    regressions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def diff_reports(before: Recorded, after: Recorded, factor: float = FACTOR) -> ReportDiff:
    """Compare two reports.

    It is a regression if an op lost its kernel, if more quantize and dequantize ops are left, or if
    the products are predicted to be slower by more than ``factor`` on the same machine.

    Ops are matched by their node, then by your line, then by their module.
    """
    pairs, removed, added = _matched(list(_runs(before)), list(_runs(after)))
    changes = [OpChange(old, new) for old, new in pairs if old.kernel != new.kernel]
    lost = tuple(c for c in changes if c.after.kernel == _FLOAT)
    gained = tuple(c for c in changes if c.before.kernel == _FLOAT)
    moved = tuple(c for c in changes if _FLOAT not in {c.before.kernel, c.after.kernel})
    left = _left(before), _left(after)
    seconds = _predicted(before), _predicted(after)
    facts = _facts(before, after)
    worse = [f"{len(lost)} op{'s' * (len(lost) != 1)} lost the kernel"] if lost else []
    if left[1] > left[0]:
        worse.append(f"{left[1] - left[0]} more quantize or dequantize left")
    old, new = seconds
    if old is not None and new is not None and new > old * factor and "target" not in facts:
        worse.append(f"predicted {new / old:.2f}x slower (more than {factor:g}x)")
    return ReportDiff(
        lost, gained, moved, removed, added, left, seconds, facts, regressions=tuple(worse)
    )


def _runs(report: Recorded) -> Iterator[OpRun]:
    """Yield every op that was lowered, and every product."""
    lowered = {e.place.node: e for e in report.events if isinstance(e, Lowered)}
    for event in lowered.values():
        yield OpRun(event.place, _FLOAT if event.kernel in NO_KERNELS else event.kernel)
    estimates = (e for e in report.events if isinstance(e, Estimated))
    for estimate in estimates:
        if estimate.int8_seconds is not None and estimate.place.node not in lowered:
            yield OpRun(estimate.place, _FLOAT)


def _matched(
    old: list[OpRun], new: list[OpRun]
) -> tuple[list[tuple[OpRun, OpRun]], tuple[OpRun, ...], tuple[OpRun, ...]]:
    """Return the pairs of ops, and those that only one side has."""
    pairs: list[tuple[OpRun, OpRun]] = []
    for key in _KEYS:
        waiting: dict[object, list[OpRun]] = {}
        for run in new:
            waiting.setdefault(key(run.place), []).append(run)
        rest = []
        for run in old:
            same = waiting.get(key(run.place)) if key(run.place) is not None else None
            if same:
                pairs.append((run, same.pop(0)))
            else:
                rest.append(run)
        taken = {id(run) for _, run in pairs}
        old, new = rest, [run for run in new if id(run) not in taken]
    return pairs, tuple(old), tuple(new)


def _family(place: Place) -> str:
    return place.op.split(".")[1].removesuffix("_default") if "." in place.op else place.op


# Names change with the graph, lines with the file, and a fused op may be in another module.
_KEYS: tuple[Callable[[Place], object], ...] = (
    lambda p: (p.node, p.op, p.module, p.source),
    lambda p: (p.source, p.module, _family(p)) if p.source else None,
    lambda p: (p.source, _family(p)) if p.source else None,
    lambda p: (p.module, _family(p)) if p.module else None,
    lambda p: (p.node, _family(p)),
)


def _left(report: Recorded) -> int:
    return sum(isinstance(event, Left) for event in report.events)


def _predicted(report: Recorded) -> float | None:
    work = work_share(report.events)
    return None if work is None else work.predicted_seconds


def _facts(before: Recorded, after: Recorded) -> dict[str, tuple[str, str]]:
    old, new = before.facts.rows(), after.facts.rows()
    names = [name for name in {**old, **new} if name not in _OF_A_RUN]
    pairs = {name: (old.get(name, "-"), new.get(name, "-")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _lines(diff: ReportDiff) -> Iterator[str]:
    if diff.regressions:
        yield f"worse: {'; '.join(diff.regressions)}"
    else:
        yield "not worse"
    for title, changes in (("lost", diff.lost), ("gained", diff.gained), ("moved", diff.moved)):
        for change in changes:
            what = f"{change.before.kernel} -> {change.after.kernel}"
            yield f"{title}: {what}  {_place(change.before.place)}"
    for title, runs in (("only before", diff.removed), ("only after", diff.added)):
        for run in runs:
            yield f"{title}: {run.kernel}  {_place(run.place)}"
    if diff.left[0] != diff.left[1]:
        yield f"quantize and dequantize left: {diff.left[0]} -> {diff.left[1]}"
    old, new = diff.predicted_seconds
    if old is not None and new is not None:
        yield f"predicted time of the products: {seconds_text(old)} -> {seconds_text(new)}"
    if "target" in diff.facts:
        yield "the targets differ, so these predictions are for two machines and not compared"
    for name, (before, after) in diff.facts.items():
        yield f"{name}: {before} -> {after}"


def _place(place: Place) -> str:
    return place.source or str(place)
