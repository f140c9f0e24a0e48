"""The result of a pass on a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule

from qfuse.ir.events import Exactness, Fired, Missed
from qfuse.optimize.merge.cse import Combine
from qfuse.report import Report
from qfuse.rewrite.context import Edit

PASS_STAGE = "passes"
SPELL_STAGE = "spell"
_MOST_MISSES = 40


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """The result of a pass; ``print(outcome)`` shows it.

    It has the fields of ``torch.fx``'s ``PassResult``, so that a pass works in its pass manager.

    Attributes:
        graph_module: The caller's module, which is changed in place.
        modified: Whether its graph was changed.
        report: All events: rules that fired, misses with their reasons, notes.
        unused: Names of parameters and buffers that the graph no longer uses. They are left in the
            module, since they may have other users.
    """

    graph_module: GraphModule
    modified: bool
    report: Report
    unused: tuple[str, ...] = ()

    @property
    def fired(self) -> Counter[str]:
        """How often each rule fired; rewrites of views that prepare for them do not count."""
        return Counter(event.rule for event in self._fired())

    @property
    def assumed(self) -> int:
        """The number of changes that assume equal values of parameters without values."""
        return sum(event.exactness is Exactness.ASSUMED for event in self._fired())

    @property
    def misses(self) -> tuple[Missed, ...]:
        """For each node that was not rewritten, the rule that came closest, with its reason."""
        return self.report.closest_misses

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _fired(self) -> tuple[Fired, ...]:
        fired = (e for e in self.report.events if isinstance(e, Fired) and e.stage == PASS_STAGE)
        return tuple(e for e in fired if not on_the_way(e))

    def _lines(self) -> Iterator[str]:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.fired.items()))
        assumed = f" ({self.assumed} of them assumed)" if self.assumed else ""
        yield f"fired: {counts or 'nothing'}{assumed}"
        for event in self._fired():
            note = f" ({event.note})" if event.note else ""
            mark = " [assumed]" if event.exactness is Exactness.ASSUMED else ""
            yield f"  {event.rule}{mark}: {' + '.join(map(str, event.places))}{note}"
        if self.misses:
            yield f"missed: {len(self.misses)}"
        for miss in self.misses[:_MOST_MISSES]:
            yield f"  {miss.rule} [{miss.code}]: {miss.anchor}: {miss.reason}"
        if len(self.misses) > _MOST_MISSES:
            yield f"  and {len(self.misses) - _MOST_MISSES} more, in .misses"
        yield from (f"undone: {back.rule}: {back.reason}" for back in self.report.rolled_back)
        yield from (f"note: {note.text}" for note in self.report.notes if note.warn)
        if self.unused:
            yield f"no longer used: {', '.join(self.unused)}"


def on_the_way(change: Fired | Edit) -> bool:
    """Whether only views and casts in front of quantization ops were combined."""
    place = change.anchor if isinstance(change, Edit) else change.places[0]
    return change.rule == Combine.name and not place.op.startswith("qfuse.")
