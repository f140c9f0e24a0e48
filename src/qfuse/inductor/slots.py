"""Inductor's pass slots, shared with other libraries: add, restore, and detect overwrites."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from qfuse.inductor import _inductor_api as inductor
from qfuse.inductor.hooks import SLOTS, Hooks
from qfuse.inductor.journal import PassJournal


@dataclass(frozen=True, slots=True)
class _Slot:
    """One slot.

    Attributes:
        name: The option of Inductor.
        base: The value before.
        ours: qfuse's passes, in the order of adding.
        value: The value that was set.
    """

    name: str
    base: Any = None
    ours: tuple[Any, ...] = ()
    value: Any = None


class Slots:
    """qfuse's passes in the slots.

    Inductor's options are per thread, or per ``contextvars`` context, and so is this state.

    Args:
        journal: Records overwrites.
    """

    def __init__(self, journal: PassJournal) -> None:
        self._journal = journal
        empty = tuple(_Slot(name) for name in SLOTS)
        self._slots: ContextVar[tuple[_Slot, ...]] = ContextVar("qfuse_slots", default=empty)

    def add(self, hooks: Hooks) -> None:
        """Append passes to the slots."""
        seen, lost = self._look()
        new = []
        for slot in seen:
            # With passes of ours in the slot, its value
            # contains them, and the base is what was before.
            base = slot.base if slot.ours else inductor.option(slot.name)
            new.append(replace(slot, base=base, ours=(*slot.ours, hooks.slots[slot.name])))
        self._put(new)
        self._tell(lost)

    def remove(self, hooks: Hooks) -> None:
        """Remove passes; removing the last one restores the slots."""
        seen, lost = self._look()
        gone = set(map(id, hooks.slots.values()))
        self._put([replace(s, ours=tuple(h for h in s.ours if id(h) not in gone)) for s in seen])
        self._tell(lost)

    def look(self) -> None:
        """Detect and report overwritten slots."""
        seen, lost = self._look()
        self._slots.set(seen)
        self._tell(lost)

    def _look(self) -> tuple[tuple[_Slot, ...], list[str]]:
        """Compare the slots with the values that were set, and return notes on overwrites.

        Values that others have set since are kept, without qfuse's passes in them.
        """
        seen, lost = [], []
        for slot in self._slots.get():
            now = inductor.option(slot.name)
            # By identity: others may compose a new value that
            # contains our passes, which is no overwrite.
            if slot.ours and now is not slot.value:
                passes = inductor.passes_in(now)
                if not all(any(h is other for other in passes) for h in _once(slot.ours)):
                    lost.append(
                        f"torch._inductor.config.{slot.name} was overwritten by "
                        f"{_described(now)}, so qfuse's passes no longer run: add to what "
                        "is in the slot, or set it first"
                    )
                seen.append(replace(slot, base=without(now, slot.ours), value=now))
            else:
                seen.append(slot)
        return tuple(seen), lost

    def _put(self, slots: Sequence[_Slot]) -> None:
        """Set each slot to its base value followed by qfuse's passes."""
        new = []
        for slot in slots:
            value = slot.base
            for hook in _once(slot.ours):
                value = composed(value, hook)
            inductor.set_option(slot.name, value)
            new.append(replace(slot, value=value))
        self._slots.set(tuple(new))

    def _tell(self, lost: Sequence[str]) -> None:
        """Warn once all state is consistent, since a warning may raise an error."""
        for text in lost:
            self._journal.note(text)
        for text in lost:
            warnings.warn(text, UserWarning, stacklevel=4)


def composed(base: Any, hook: Any) -> Any:
    """Return a slot value with ``base``, any value that a slot accepts, followed by ``hook``."""
    if base is None:
        return hook
    if isinstance(base, (list, tuple)):
        return type(base)([*base, hook])
    return [base, hook]


def _once(ours: Sequence[Any]) -> list[Any]:
    """Return qfuse's passes without duplicates: each is idempotent."""
    return list({hook.hooks.key: hook for hook in reversed(ours)}.values())


def without(value: Any, ours: Sequence[Any]) -> Any:
    """Return the value of a slot without qfuse's passes; the same object if there are none."""
    passes = inductor.passes_in(value)
    theirs = [p for p in passes if not any(p is hook for hook in ours)]
    if len(theirs) == len(passes):
        return value
    # An empty slot is `None` in Inductor.
    if not isinstance(value, (list, tuple)) or not theirs:
        return None
    return type(value)(theirs)


def _described(value: Any) -> str:
    """Describe an object by its name and module."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_described, value)) or "an empty list"
    if value is None:
        return "None"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None) or type(value).__module__
    return f"{name} from {module}"
