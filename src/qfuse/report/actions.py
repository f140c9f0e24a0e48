"""What to do about ops that are not quantized or not fused, by what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from qfuse.ir.events import (
    Event,
    MissCode,
    Noted,
    Place,
    RolledBack,
)
from qfuse.report.advice import Advice, Cause, advice_for
from qfuse.report.causes import Causes


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do, at one or several places with the same reason.

    Attributes:
        seconds: Predicted seconds per call that these places cost; ``None`` if unknown.
        code: Code of the miss; ``None`` for an op that is left, or was not imported.
        tried: The rule or kernel that came closest, or what is left.
        reason: The condition that failed.
        advice: What to do; ``None`` if nothing that the user can change helps.
        places: Where, the most expensive first.
    """

    seconds: float | None
    code: MissCode | None
    tried: str
    reason: str
    advice: Advice | None
    places: tuple[Place, ...]

    @property
    def is_useful(self) -> bool:
        """Whether it is a warning, costs something known, or has a suggestion."""
        of_the_model = not self.places or self.code is MissCode.BANNED
        return of_the_model or self.seconds is not None or self.advice is not None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; the seconds are called ``predicted_seconds``."""
        advice = self.advice
        return {
            "predicted_seconds": self.seconds,
            "code": None if self.code is None else self.code.value,
            "tried": self.tried,
            "reason": self.reason,
            "advice": None if advice is None else advice.to_dict(),
            "places": [asdict(place) for place in self.places],
        }


def actions_of(events: Iterable[Event]) -> tuple[Action, ...]:
    """Return the actions: of the whole model, then by cost, and last those of unknown cost."""
    known = list(events)
    # One suggestion holds for all places of a group.
    groups: dict[tuple[str, str, str], list[tuple[Cause, Place, float | None]]] = {}
    undone = {place for event in known if isinstance(event, RolledBack) for place in event.places}
    for cause, place, seconds in Causes(known).all():
        # That it was undone says why, and not what kernels would not have taken either.
        if place in undone:
            continue
        advice = advice_for(cause)
        # The two halves of a quantization that is written out miss for one reason.
        key = ("" if advice else cause.tried), cause.reason, "" if advice is None else advice.name
        groups.setdefault(key, []).append((cause, place, seconds))
    actions = [_action(group, group[0][0]) for group in groups.values()]
    actions = [*actions, *_noted(known, actions)]
    # The sort is stable: the order of the graph breaks ties.
    actions.sort(key=lambda a: math.inf if a.seconds is None else -a.seconds)
    return *(dict.fromkeys(_of_the_model(known))), *actions


def _noted(events: list[Event], others: list[Action]) -> Iterator[Action]:
    """Yield what notes say to do, such as those of the lint; once for all notes of one stage.

    A place that another action has advice for has one reason more, and nothing more to do.
    """
    advised = {(p.module, p.source) for a in others if a.advice is not None for p in a.places}
    groups: dict[str, list[tuple[Noted, Place]]] = {}
    for note in events:
        if isinstance(note, Noted) and note.do and note.place is not None:
            place = note.place
            if (place.module, place.source) not in advised:
                groups.setdefault(note.stage, []).append((note, place))
    for tried, group in groups.items():
        first = group[0][0]
        known = [note.seconds for note, _ in group if note.seconds is not None]
        yield Action(
            sum(known) if known else None,
            None,
            tried,
            first.text,
            Advice(tried, first.do, ()),
            tuple(dict.fromkeys(place for _, place in group)),
        )


def _of_the_model(events: list[Event]) -> Iterator[Action]:
    """Yield what concerns the whole model: rewrites that were undone, and warnings."""
    for event in events:
        if isinstance(event, RolledBack):
            cause = Cause(MissCode.BANNED, event.rule, f"rolled back: {event.reason}")
            yield _action([(cause, place, None) for place in event.places], cause)
        elif isinstance(event, Noted) and event.warn and event.place is None:
            yield _action([], Cause(None, "warning", event.text))


def _action(group: list[tuple[Cause, Place, float | None]], cause: Cause) -> Action:
    group = sorted(group, key=lambda one: -(one[2] or 0.0))
    known = [seconds for _, _, seconds in group if seconds is not None]
    places = tuple(dict.fromkeys(place for _, place, _ in group))
    return Action(
        sum(known) if known else None,
        cause.code,
        cause.tried,
        cause.reason,
        advice_for(cause),
        places,
    )
