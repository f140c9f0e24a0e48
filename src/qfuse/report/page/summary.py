"""What stands at the top of the page: the verdict, and what to do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qfuse.ir.events import MissCode

if TYPE_CHECKING:
    from qfuse.report.report import Report

_MOST = 5


@dataclass(frozen=True, slots=True)
class ToDo:
    """One thing to do.

    Attributes:
        do: What to change, or "".
        why: The reason.
        seconds: Predicted seconds per call that it costs; ``None`` if unknown.
        nodes: Names of the nodes that it is about.
    """

    do: str
    why: str
    seconds: float | None
    nodes: tuple[str, ...]


def verdict(report: Report) -> str:
    """Return in one line what was achieved."""
    fused, expanded, left = len(report.fused), len(report.expanded), len(report.left)
    return f"{fused} quantized ops on kernels, {expanded} expanded, {left} left as they are"


def to_do(report: Report) -> tuple[ToDo, ...]:
    """Return at most five things to do."""
    groups: dict[tuple[str, str], list[str]] = {}
    for event in report.left:
        groups.setdefault((event.place.op, event.reason), []).append(event.place.node)
    for miss in report.closest_misses:
        if miss.code is not MissCode.PROFIT:
            groups.setdefault((miss.rule, miss.reason), []).append(miss.anchor.node)
    counts = Counter({key: len(nodes) for key, nodes in groups.items()})
    return tuple(
        ToDo("", f"{what}: {reason}", None, tuple(groups[what, reason]))
        for (what, reason), _ in counts.most_common(_MOST)
    )


def suggestions(report: Report) -> dict[str, str]:
    """Return what to do by name of the node."""
    return {node: item.do for item in to_do(report) for node in item.nodes}


def facts(report: Report) -> list[list[str]]:
    """Return the facts about the compilation, as pairs of texts."""
    return [[str(name), str(value)] for name, value in report.facts.items()]
