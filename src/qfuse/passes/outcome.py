"""What a pass did to a graph, for programs and for people."""

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
    """What a pass did. ``print(outcome)`` shows it.

    It has the fields of ``torch.fx``'s own pass results, so a pass is at home in its pass manager.

    Attributes:
        graph_module: The module that was given, which is changed in place.
        modified: Whether its graph was changed.
        report: Every event: what fired, what was missed and why, what else to know.
        unused: Names of parameters and buffers that the graph read before and does not any more.
            They are left in the module, since others may read them.
    """

    graph_module: GraphModule
    modified: bool
    report: Report
    unused: tuple[str, ...] = ()

    @property
    def fired(self) -> Counter[str]:
        """How often each rule changed quantization or linears; views on the way do not count."""
        return Counter(event.rule for event in self._fired())

    @property
    def assumed(self) -> int:
        """How many of the changes are right only if parameters without values are equal."""
        return sum(event.exactness is Exactness.ASSUMED for event in self._fired())

    @property
    def misses(self) -> tuple[Missed, ...]:
        """For every node that was not rewritten, the rule that came closest, with its reason."""
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
            yield f"not read any more: {', '.join(self.unused)}"


def on_the_way(change: Fired | Edit) -> bool:
    """Whether what was combined is not quantization, but the views and casts in front of it."""
    place = change.anchor if isinstance(change, Edit) else change.places[0]
    return change.rule == Combine.name and not place.op.startswith("qfuse.")
