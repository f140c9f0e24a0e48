"""The data of the page: the sites, the nodes of the four stages, times and memory.

Texts that occur often are stored once and named by their number, so that the page of a large model
stays small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qfuse.cost import seconds_text
from qfuse.ir.events import HOST, Estimated, ExpandCause, Lowered, Place
from qfuse.profile import Profile
from qfuse.report.page.summary import ToDo, all_to_do, facts, suggestions
from qfuse.report.screen import verdict
from qfuse.snapshots import NodeSnapshot, StageSnapshot

if TYPE_CHECKING:
    from qfuse.report.report import Report

_CAUSES = {ExpandCause.LOOPS: "loops", ExpandCause.PROFIT: "float"}
_KINDS = {"get_attr": "constant", "placeholder": "input", "output": "output"}


def page_data(report: Report, profile: Profile | None, sqnr: Mapping[str, float]) -> dict[str, Any]:
    """Return everything that the page shows, as plain data."""
    return _Page(report, profile, sqnr).data()


@dataclass(slots=True)
class _Texts:
    """Numbers texts in the order of their first use."""

    numbers: dict[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


@dataclass(frozen=True, slots=True)
class _Site:
    """One row of the table of sites."""

    status: str
    place: Place
    op: str
    kernel: str
    why: str
    predicted: float | None = None
    pattern: str = ""
    losers: str = ""


class _Page:
    """Builds the data of one page."""

    def __init__(self, report: Report, profile: Profile | None, sqnr: Mapping[str, float]) -> None:
        self._report = report
        self._profile = profile
        self._sqnr = {name: round(float(value), 2) for name, value in sqnr.items() if _real(value)}
        self._text = _Texts()
        self._to_do: tuple[ToDo, ...] = all_to_do(report)
        self._stages = report.stages
        self._index = [
            {node.name: number for number, node in enumerate(stage.nodes)} for stage in self._stages
        ]
        self._of_site: dict[str, list[int]] = {}
        for number, node in enumerate(self._stages[-1].nodes if self._stages else ()):
            if node.site:
                self._of_site.setdefault(node.site, []).append(number)

    def data(self) -> dict[str, Any]:
        report = self._report
        sites = list(_sites(report))
        numbers: dict[str, list[int]] = {}
        for number, site in enumerate(sites):
            numbers.setdefault(site.place.node, []).append(number)
        found = {
            "title": report.facts.model,
            "verdict": verdict(report),
            "facts": facts(report),
            "todo": [
                {
                    "do": item.do,
                    "why": item.why,
                    "cost": "" if item.seconds is None else seconds_text(item.seconds),
                    "place": item.place,
                    "sites": sorted({n for node in item.nodes for n in numbers.get(node, ())}),
                    "count": len(item.nodes),
                }
                for item in self._to_do
            ],
            "stages": [self._stage(stage) for stage in self._stages],
            "sites": self._rows(sites),
            "ops": self._ops(sites),
            "total": self._total(),
            "memory": self._memory(),
            "sqnr": self._sqnr,
        }
        return {**found, "text": list(self._text.numbers)}

    def _stage(self, stage: StageSnapshot) -> dict[str, Any]:
        number = self._stages.index(stage)
        index, first = self._index[number], self._index[0]
        nodes = stage.nodes
        return {
            "name": stage.stage,
            "node": [node.name for node in nodes],
            "kind": [_KINDS.get(node.op, "call") for node in nodes],
            "op": [self._text(node.op) for node in nodes],
            "type": [self._text(node.type) for node in nodes],
            "module": [self._text(node.module) for node in nodes],
            "source": [self._text(node.source) for node in nodes],
            "rule": [self._text(node.rule) for node in nodes],
            "bytes": [node.bytes for node in nodes],
            "inputs": [[index[name] for name in node.inputs] for node in nodes],
            "origins": [[first[o] for o in node.origins if o in first] for node in nodes],
        }

    def _rows(self, sites: Sequence[_Site]) -> list[dict[str, Any]]:
        do = suggestions(self._to_do)
        return [self._row(site, do.get(site.place.node, "")) for site in sites]

    def _row(self, site: _Site, do: str) -> dict[str, Any]:
        place, text = site.place, self._text
        measured, predicted = self._times(site)
        return {
            "status": site.status,
            "op": text(site.op),
            "kernel": text(site.kernel),
            "why": text(site.why),
            "source": text(place.source),
            "module": text(place.module),
            "do": text(do),
            "pattern": text(site.pattern),
            "losers": text(site.losers),
            "us": measured,
            "predicted": predicted,
            "nodes": self._places(place.node),
        }

    def _places(self, name: str) -> list[list[int]]:
        """Return the nodes of a site: stage and number, that of the optimized graph first."""
        found = [[s, index[name]] for s, index in enumerate(self._index) if name in index]
        found.sort(key=lambda pair: pair[0] != len(self._index) - 2)
        last = len(self._index) - 1
        return found + [[last, n] for n in self._of_site.get(name, ()) if [last, n] not in found]

    def _times(self, site: _Site) -> tuple[float | None, float | None]:
        """Return the measured and the predicted microseconds of a site."""
        predicted = _us(site.predicted)
        if self._profile is None:
            return None, predicted
        name = site.place.node
        ops = [
            op for op in self._profile.ops if op.site == name or (not op.site and op.name == name)
        ]
        if not ops:
            return None, predicted
        if predicted is None and all(op.predicted is not None for op in ops):
            predicted = _us(sum(op.predicted or 0.0 for op in ops))
        return sum(op.nanoseconds for op in ops) / 1e3, predicted

    def _ops(self, sites: Sequence[_Site]) -> list[dict[str, Any]]:
        """Return what the timeline shows: measured ops, or else what the cost model predicts."""
        if not self._stages:
            return []
        index = self._index[-1]
        if self._profile is not None:
            return [
                {
                    "op": self._text(op.op),
                    "nodes": [index[name] for name in op.nodes if name in index],
                    "main": index.get(op.name),
                    "us": op.nanoseconds / 1e3,
                    "predicted": _us(op.predicted),
                    "gb": _rounded(op.bytes_per_second, 1e9),
                    "gop": _rounded(op.operations_per_second, 1e9),
                    "share": _rounded(op.roofline_share, 1),
                }
                for op in self._profile.ops
            ]
        predicted = _predicted(self._report, sites)
        rows = []
        for name, (op, seconds) in predicted.items():
            alone = [index[name]] if name in index else []
            numbers = self._of_site.get(name, alone)
            if numbers:
                rows.append(
                    {
                        "op": self._text(op),
                        "nodes": numbers,
                        "main": next((n for n in numbers if self._is_call(n)), numbers[0]),
                        "us": None,
                        "predicted": _us(seconds),
                        "gb": None,
                        "gop": None,
                        "share": None,
                    }
                )
        return sorted(rows, key=lambda row: row["main"])

    def _is_call(self, number: int) -> bool:
        node: NodeSnapshot = self._stages[-1].nodes[number]
        return node.op not in _KINDS and node.op != "getitem"

    def _total(self) -> dict[str, Any] | None:
        profile = self._profile
        if profile is None:
            return None
        return {
            "us": profile.nanoseconds / 1e3,
            "compiled": profile.compiled_nanoseconds / 1e3,
            "least_text": (
                seconds_text(profile.compiled_least_nanoseconds * 1e-9)
                if profile.is_disturbed
                else ""
            ),
            "text": seconds_text(profile.nanoseconds * 1e-9),
            "compiled_text": seconds_text(profile.compiled_nanoseconds * 1e-9),
            "backend": profile.backend,
            "rounds": profile.rounds,
        }

    def _memory(self) -> list[list[int]]:
        """Return the lowered node, and the live bytes during and after it."""
        points = self._report.memory if self._profile is None else self._profile.memory
        index = self._index[-1] if self._index else {}
        return [[index[p.node], p.during, p.after] for p in points if p.node in index]


def _sites(report: Report) -> Iterator[_Site]:
    """Yield the sites: lowered ops, ops that were left, and nodes that no rule rewrote."""
    for event in (*report.fused, *report.in_float, *report.expanded, *report.refused):
        yield _lowered(event)
    missed = report.closest_at
    for left in report.left:
        status = "needed" if left.needed else "left"
        miss = missed.get(left.place.node)
        near = "" if miss is None else f"; closest, {miss.told}"
        pattern = "" if miss is None else miss.pattern
        yield _Site(status, left.place, left.place.op, "", left.reason + near, None, pattern)
    for miss in report.closest_misses:
        yield _Site("not fused", miss.anchor, miss.anchor.op, "", miss.told, None, miss.pattern)


def _predicted(report: Report, sites: Sequence[_Site]) -> dict[str, tuple[str, float]]:
    """Return what runs each op and its predicted seconds, by the name of the op.

    They are the kernels, the products in float, and the quantizes and dequantizes that were left.
    The loops of other ops have no prediction.
    """
    found = {s.place.node: (s.kernel, s.predicted) for s in sites if s.predicted is not None}
    left = {event.place.node for event in report.left}
    for event in report.events:
        if isinstance(event, Estimated) and (
            event.int8_seconds is not None or event.place.node in left
        ):
            found.setdefault(event.place.node, (event.place.op, event.float_seconds))
    return found


def _lowered(event: Lowered) -> _Site:
    status = "refused" if event.kernel == HOST else "kernel"
    if event.cause is not None:
        status = _CAUSES.get(event.cause, "expanded")
    # Kernels that refuse for one reason come in one line.
    refused: dict[str, list[str]] = {}
    lost = event.lost if event.cause is None else event.nearest
    for one, reason in lost:
        refused.setdefault(reason, []).append(one.kernel if event.cause is None else one.label)
    losers = "\n".join(f"{', '.join(names)}: {reason}" for reason, names in refused.items())
    # Why others lost is no reason for the kernel that runs.
    why = event.why if status == "kernel" else event.why or losers.partition("\n")[0]
    if event.cause not in {None, ExpandCause.PROFIT} and event.why and event.losers:
        why = f"{event.why}; closest, {event.closest}"
    place, kernel = event.place, event.kernel
    return _Site(status, place, event.what, kernel, why, event.predicted, losers=losers)


def _us(seconds: float | None) -> float | None:
    return None if seconds is None or not _real(seconds) else round(seconds * 1e6, 3)


def _rounded(value: float | None, unit: float) -> float | None:
    return None if value is None or not _real(value) else float(f"{value / unit:.4g}")


def _real(value: float) -> bool:
    return math.isfinite(value)
