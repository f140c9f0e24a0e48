"""What stands at the top of the page: what to do, and the facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qfuse.ir.events import Place
from qfuse.report.screen import line_text

if TYPE_CHECKING:
    from qfuse.report.report import Report


@dataclass(frozen=True, slots=True)
class ToDo:
    """One thing to do.

    Attributes:
        do: What to change, or "".
        why: The reason.
        seconds: Predicted seconds per call that it costs; ``None`` if unknown.
        place: The module of its first place, or its line, or "".
        nodes: Names of the nodes that it is about.
    """

    do: str
    why: str
    seconds: float | None
    place: str
    nodes: tuple[str, ...]


def all_to_do(report: Report) -> tuple[ToDo, ...]:
    """Return everything to do, the most expensive first."""
    return tuple(
        ToDo(
            "" if action.advice is None else action.advice.do,
            f"{action.tried}: {action.reason}",
            action.seconds,
            _where(action.places),
            tuple(place.node for place in action.places),
        )
        for action in report.actions
    )


def _where(places: tuple[Place, ...]) -> str:
    return (places[0].module or line_text(places[0])) if places else ""


def suggestions(items: tuple[ToDo, ...]) -> dict[str, str]:
    """Return what to do by name of the node."""
    return {node: item.do for item in reversed(items) for node in item.nodes if item.do}


def facts(report: Report) -> list[list[str]]:
    """Return the facts about the compilation, as pairs of texts."""
    return [[name, text] for name, text in report.facts.rows().items()]
