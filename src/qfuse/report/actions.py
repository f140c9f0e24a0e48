"""What to do about ops that are not quantized or not fused, by what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from qfuse.ir.events import (
    Estimated,
    Event,
    Left,
    Lowered,
    MissCode,
    Missed,
    Noted,
    Place,
    RolledBack,
)
from qfuse.report.advice import Advice, Cause, advice_for
from qfuse.report.misses import closest, explains_input
from qfuse.report.work import kernels_of

_FEEDS = "it feeds "


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do, at one or several places with the same reason.

    Attributes:
        seconds: Predicted seconds per call that these places cost; ``None`` if unknown.
        tried: The rule or kernel that came closest, or what is left.
        reason: The condition that failed.
        advice: What to do; ``None`` if nothing that the user can change helps.
        places: Where, the most expensive first.
    """

    seconds: float | None
    tried: str
    reason: str
    advice: Advice | None
    places: tuple[Place, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; the seconds are called ``predicted_seconds``."""
        advice = self.advice
        return {
            "predicted_seconds": self.seconds,
            "tried": self.tried,
            "reason": self.reason,
            "advice": None if advice is None else advice.to_dict(),
            "places": [asdict(place) for place in self.places],
        }


def actions_of(events: Iterable[Event]) -> tuple[Action, ...]:
    """Return the actions: of the whole model, then by cost, and last those of unknown cost."""
    known = list(events)
    groups: dict[tuple[str, str], list[tuple[Cause, Place, float | None]]] = {}
    for cause, place, seconds in _Causes(known).all():
        groups.setdefault((cause.tried, cause.reason), []).append((cause, place, seconds))
    actions = [_action(group) for group in groups.values()]
    # The sort is stable: the order of the graph breaks ties.
    actions.sort(key=lambda a: math.inf if a.seconds is None else -a.seconds)
    return *(dict.fromkeys(_of_the_model(known))), *actions


def _of_the_model(events: list[Event]) -> Iterator[Action]:
    """Yield what concerns the whole model: rewrites that were undone, and warnings."""
    for event in events:
        if isinstance(event, RolledBack):
            cause = Cause(MissCode.BANNED, event.rule, f"rolled back: {event.reason}")
            yield Action(None, cause.tried, cause.reason, advice_for(cause), event.places)
        elif isinstance(event, Noted) and event.warn and event.place is None:
            yield Action(None, "warning", event.text, advice_for(Cause(None, "", event.text)), ())


def _action(group: list[tuple[Cause, Place, float | None]]) -> Action:
    group = sorted(group, key=lambda one: -(one[2] or 0.0))
    known = [seconds for _, _, seconds in group if seconds is not None]
    cause = group[0][0]
    places = tuple(dict.fromkeys(place for _, place, _ in group))
    advice = advice_for(cause)
    return Action(sum(known) if known else None, cause.tried, cause.reason, advice, places)


class _Causes:
    """Matches what was not fused with the reasons."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._kernels = kernels_of(events)
        self._misses = closest(e for e in events if isinstance(e, Missed))
        self._estimates = {e.place.node: e for e in events if isinstance(e, Estimated)}
        self._lowered = {e.place.node: e for e in events if isinstance(e, Lowered)}
        self._left = {e.place.node: e for e in events if isinstance(e, Left)}
        self._warned = {
            e.place.node: e for e in events if isinstance(e, Noted) and e.warn and e.place
        }
        self._explained: set[str] = set()

    def all(self) -> Iterator[tuple[Cause, Place, float | None]]:
        """Yield every cause with its place and its predicted cost."""
        for estimate in self._estimates.values():
            found = self._product(estimate)
            if found is not None:
                yield found
        for left in self._left.values():
            if left.place.node not in self._explained and _FEEDS not in left.reason:
                yield self._quantize(left)
        for note in self._warned.values():
            assert note.place is not None, "only notes with a place are kept"
            if note.place.node not in self._explained:
                yield Cause(None, "import", note.text), note.place, None
        for node, miss in self._misses.items():
            if node not in self._explained and explains_input(miss):
                yield _missed(miss), miss.anchor, None

    def _product(self, product: Estimated) -> tuple[Cause, Place, float | None] | None:
        """Return why a product does not run on a quantized kernel, if that costs something."""
        node = product.place.node
        lowered = self._lowered.get(node)
        if product.int8_seconds is None or node in self._kernels:
            return None
        upstream = [name for name in product.upstream if name in self._left]
        passes = sum(self._estimates[name].float_seconds for name in upstream)
        cost = product.float_seconds + passes - product.int8_seconds
        self._explained.update(upstream, product.upstream)
        # The cost model prefers float here, so nothing is lost.
        if cost <= 0 or (lowered is not None and not lowered.failed):
            return None
        return self._why(product, lowered), product.place, cost

    def _why(self, product: Estimated, lowered: Lowered | None) -> Cause:
        if lowered is not None:
            # Kernels are asked in the order of the registry, the most general one first.
            tried, reason = next(iter(lowered.losers), (lowered.kernel, lowered.why))
            return Cause(MissCode.NO_KERNEL, tried, reason)
        for name in product.upstream:
            if name in self._warned:
                return Cause(None, "import", self._warned[name].text)
        own = self._misses.get(product.place.node)
        inputs = [self._misses[name] for name in product.upstream if name in self._misses]
        inputs = [miss for miss in inputs if explains_input(miss)]
        # A weight that is computed by a chain that was not recognized only looks like a float.
        if inputs and (own is None or own.code is MissCode.NOT_QUANTIZED):
            return _missed(max(inputs, key=lambda miss: miss.progress))
        if own is not None:
            return _missed(own)
        return Cause(MissCode.NOT_QUANTIZED, product.place.op, "it computes in float")

    def _quantize(self, left: Left) -> tuple[Cause, Place, float | None]:
        estimate = self._estimates.get(left.place.node)
        seconds = None if estimate is None else estimate.float_seconds
        miss = self._misses.get(left.place.node)
        op = left.place.op.rpartition(".")[2]
        if miss is None:
            return Cause(None, f"left {op}", left.reason), left.place, seconds
        return Cause(miss.code, miss.rule, miss.reason, left.reason), left.place, seconds


def _missed(miss: Missed) -> Cause:
    return Cause(miss.code, miss.rule, miss.reason)
