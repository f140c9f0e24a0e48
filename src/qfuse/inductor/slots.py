"""Inductor's slots, which others use too: what is put in, what is restored, who was in the way."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qfuse.inductor import _inductor_api as inductor
from qfuse.inductor.hooks import SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qfuse.inductor.hooks import Hooks
    from qfuse.inductor.journal import Journal

__all__ = ["Slots", "composed"]


@dataclass(slots=True)
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
    ours: list[Any] = field(default_factory=list)
    value: Any = None


class Slots:
    """Our passes in the slots of the process.

    Args:
        journal: Told who was in the way.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lock = threading.RLock()
        self._slots = [_Slot(name) for name in SLOTS]

    def add(self, hooks: Hooks) -> None:
        """Append passes to what is in the slots."""
        with self._lock:
            lost = [self._look(slot) for slot in self._slots]
            for slot in self._slots:
                if not slot.ours:
                    slot.base = inductor.option(slot.name)
                slot.ours.append(hooks.slots[slot.name])
                _put(slot)
        self._tell(lost)

    def remove(self, hooks: Hooks) -> None:
        """Take passes out again; when the last of ours goes, what was there is there again."""
        with self._lock:
            lost = [self._look(slot) for slot in self._slots]
            for slot in self._slots:
                slot.ours.remove(hooks.slots[slot.name])
                _put(slot)
        self._tell(lost)

    def look(self) -> None:
        """Find out whether somebody overwrote a slot, and say so."""
        with self._lock:
            lost = [self._look(slot) for slot in self._slots]
        self._tell(lost)

    def _look(self, slot: _Slot) -> str:
        """Find out whether what is in a slot is what was put there; say so if it is not.

        What somebody else put there since is theirs: it stays, without what is ours in it.
        """
        now = inductor.option(slot.name)
        if not slot.ours or now is slot.value:
            return ""
        passes = inductor.passes_in(now)
        lost = [hook for hook in _once(slot.ours) if not any(hook is other for other in passes)]
        slot.base = _without(now, slot.ours)
        slot.value = now
        if not lost:
            return ""
        return (
            f"torch._inductor.config.{slot.name} was overwritten by {_described(now)}, so "
            "qfuse's passes did not run any more: add to what is in the slot, or set it first"
        )

    def _tell(self, lost: Sequence[str]) -> None:
        """Warn, when everything is in order again: a warning may be an error here."""
        texts = list(filter(None, lost))
        for text in texts:
            self._journal.note(text)
        for text in texts:
            warnings.warn(text, UserWarning, stacklevel=4)


def composed(base: Any, hook: Any) -> Any:
    """Return what holds ``base``, which may be anything that a slot takes, and ``hook`` behind."""
    if base is None:
        return hook
    if isinstance(base, (list, tuple)):
        return type(base)([*base, hook])
    return [base, hook]


def _put(slot: _Slot) -> None:
    value = slot.base
    for hook in _once(slot.ours):
        value = composed(value, hook)
    slot.value = value
    inductor.set_option(slot.name, value)


def _once(ours: Sequence[Any]) -> list[Any]:
    """Return one of our passes for each thing that they do: to do it twice changes nothing."""
    return list({hook.hooks.key: hook for hook in reversed(ours)}.values())


def _without(value: Any, ours: list[Any]) -> Any:
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
