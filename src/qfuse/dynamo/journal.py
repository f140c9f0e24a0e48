"""The reports of the graphs that ``torch.compile(model, backend="qfuse")`` compiled."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

from qfuse import exported, inductor
from qfuse.api import CompiledModel
from qfuse.dynamo._dynamo_api import compilation_of
from qfuse.ir.errors import OptionsError
from qfuse.ir.words import a_kind
from qfuse.report import Report


@dataclass(frozen=True, slots=True)
class _Record:
    """The report of a graph, and the call of ``torch.compile`` that it belongs to."""

    report: Report
    owner: weakref.ref[object] | None


class GraphJournal:
    """The reports of this process, in the order of compilation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[_Record] = []

    def add(self, report: Report, owner: object | None) -> None:
        """Record the report of a graph of ``owner``."""
        with self._lock:
            kept = weakref.ref(owner) if owner is not None else None
            self._records.append(_Record(report, kept))

    def reports(self, owner: object | None = None) -> tuple[Report, ...]:
        """Return all reports, or those of one owner."""
        with self._lock:
            records = list(self._records)
        if owner is None:
            return tuple(record.report for record in records)
        return tuple(r.report for r in records if r.owner is not None and r.owner() is owner)

    def clear(self) -> None:
        """Drop all reports."""
        with self._lock:
            self._records.clear()


# A backend is a function, and the compiled graph does not name its caller.
JOURNAL = GraphJournal()


def reports(compiled: object | None = None) -> tuple[Report, ...]:
    """Return the reports of compiled graphs, one per graph, in the order of compilation.

    Args:
        compiled: The result of ``torch.compile(model, backend="qfuse")``, of ``qfuse.compile`` or
            of ``qfuse.optimize``. By default all graphs that ``torch.compile`` compiled with qfuse,
            as backend or in Inductor's slots. A model has several graphs after a graph break, and
            after a recompilation for other sizes; one that runs eagerly has a report with the
            reason.

    Raises:
        OptionsError: ``compiled`` is something else.
    """
    if compiled is None:
        return (*JOURNAL.reports(), *inductor.slot_reports())
    if isinstance(compiled, CompiledModel):
        return (compiled.report,)
    found = exported.report_of(compiled)
    if found is not None:
        return (found,)
    owner = compilation_of(compiled)
    if owner is None:
        raise OptionsError(
            f"{a_kind(compiled)} has no reports",
            fix="pass what torch.compile, qfuse.compile or qfuse.optimize returned, or nothing",
        )
    return JOURNAL.reports(owner)


def clear_reports() -> None:
    """Drop the reports of ``torch.compile``, for long-running processes."""
    JOURNAL.clear()
    inductor.clear_slot_reports()
