"""Inductor's slots, which others use too: what is put in, what is restored, who was in the way."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from qfuse.inductor import _inductor_api as inductor
from qfuse.inductor.hooks import SLOTS, Hooks
from qfuse.inductor.journal import Journal


@dataclass(frozen=True, slots=True)
class _Slot:
    """One slot.

    Attributes:
        name: The option of Inductor.
        base: What was there before.
        ours: Our passes, in the order in which they came.
        value: What we put there.
    """

    name: str
    base: Any = None
    ours: tuple[Any, ...] = ()
    value: Any = None


class Slots:
    """Our passes in the slots.

    Inductor's options hold for one thread, or one context of ``contextvars``: so does what is known
    of them here.

    Args:
        journal: Told who was in the way.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        empty = tuple(_Slot(name) for name in SLOTS)
        self._slots: ContextVar[tuple[_Slot, ...]] = ContextVar("qfuse_slots", default=empty)

    def add(self, hooks: Hooks) -> None:
        """Append passes to what is in the slots."""
        seen, lost = self._look()
        new = []
        for slot in seen:
            base = slot.base if slot.ours else inductor.option(slot.name)
            new.append(replace(slot, base=base, ours=(*slot.ours, hooks.slots[slot.name])))
        self._put(new)
        self._tell(lost)

    def remove(self, hooks: Hooks) -> None:
        """Take passes out again; when the last of ours goes, what was there is there again."""
        seen, lost = self._look()
        gone = set(map(id, hooks.slots.values()))
        self._put([replace(s, ours=tuple(h for h in s.ours if id(h) not in gone)) for s in seen])
        self._tell(lost)

    def look(self) -> None:
        """Find out whether somebody overwrote a slot, and say so."""
        seen, lost = self._look()
        self._slots.set(seen)
        self._tell(lost)

    def _look(self) -> tuple[tuple[_Slot, ...], list[str]]:
        """Compare what is in the slots with what was put there; name what somebody overwrote.

        What somebody else put there since is theirs: it stays, without what is ours in it.
        """
        seen, lost = [], []
        for slot in self._slots.get():
            now = inductor.option(slot.name)
            if slot.ours and now is not slot.value:
                passes = inductor.passes_in(now)
                if not all(any(h is other for other in passes) for h in _once(slot.ours)):
                    lost.append(
                        f"torch._inductor.config.{slot.name} was overwritten by "
                        f"{_described(now)}, so qfuse's passes did not run any more: add to what "
                        "is in the slot, or set it first"
                    )
                seen.append(replace(slot, base=without(now, slot.ours), value=now))
            else:
                seen.append(slot)
        return tuple(seen), lost

    def _put(self, slots: Sequence[_Slot]) -> None:
        """Set the slots, each to what was there with ours behind it."""
        new = []
        for slot in slots:
            value = slot.base
            for hook in _once(slot.ours):
                value = composed(value, hook)
            inductor.set_option(slot.name, value)
            new.append(replace(slot, value=value))
        self._slots.set(tuple(new))

    def _tell(self, lost: Sequence[str]) -> None:
        """Warn, when everything is in order again: a warning may be an error here."""
        for text in lost:
            self._journal.note(text)
        for text in lost:
            warnings.warn(text, UserWarning, stacklevel=4)


def composed(base: Any, hook: Any) -> Any:
    """Return what holds ``base``, which may be anything that a slot takes, and ``hook`` behind."""
    if base is None:
        return hook
    if isinstance(base, (list, tuple)):
        return type(base)([*base, hook])
    return [base, hook]


def _once(ours: Sequence[Any]) -> list[Any]:
    """Return one of our passes for each thing that they do: to do it twice changes nothing."""
    return list({hook.hooks.key: hook for hook in reversed(ours)}.values())


def without(value: Any, ours: Sequence[Any]) -> Any:
    """Return what is in a slot, without our passes; the same object if there are none."""
    passes = inductor.passes_in(value)
    theirs = [p for p in passes if not any(p is hook for hook in ours)]
    if len(theirs) == len(passes):
        return value
    if not isinstance(value, (list, tuple)) or not theirs:
        return None
    return type(value)(theirs)


def _described(value: Any) -> str:
    """Name an object, and the module that it is from."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_described, value)) or "an empty list"
    if value is None:
        return "None"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None) or type(value).__module__
    return f"{name} from {module}"
