"""The result of a quantization recipe: the model, and what stayed float and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

_SHOWN = 3


@dataclass(frozen=True)
class Note:
    """Places that share one reason.

    Attributes:
        places: Names of modules, or of operators with their number.
        reason: Why they are not quantized, or not as expected.
    """

    places: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        """Return one line, with the first few places."""
        rest = len(self.places) - _SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        shown = ", ".join(place or "the model itself" for place in self.places[:_SHOWN])
        return f"{shown}{more}: {self.reason}"


@dataclass(frozen=True)
class Outcome:
    """The result of quantizing a model.

    Attributes:
        model: The quantized copy, in eval mode.
        layers: How many layers were quantized.
        notes: What stayed float, and why.
    """

    model: nn.Module
    layers: int
    notes: tuple[Note, ...]


def group_notes(found: Iterable[tuple[str, str]]) -> tuple[Note, ...]:
    """Return one note per reason for pairs (place, reason), in the order of first appearance."""
    places: dict[str, list[str]] = {}
    for place, reason in found:
        places.setdefault(reason, []).append(place)
    return tuple(Note(tuple(names), reason) for reason, names in places.items())
