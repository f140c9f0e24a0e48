"""What the lint found at one place: numbers, cost, and what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from qfuse.ir.events import Noted, Place


class Severity(StrEnum):
    """How much a finding matters.

    ``WARNING``: accuracy or time is lost, and a change of the quantization avoids it. ``INFO``: a
    fact with a cost that may be intended.
    """

    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A problem with the placement or the parameters of quantization.

    Attributes:
        code: Stable name of the check, such as ``double-rounding``.
        severity: How much it matters.
        place: The op, with module path and line of the user's source.
        seen: What was seen, as a sentence without a period.
        fix: What to change, as an instruction.
        predicted_us: Microseconds per call that the change is predicted to save; ``None`` if the
            cost model does not know.
        numbers: The numbers behind ``seen``, by names with units.
    """

    code: str
    severity: Severity
    place: Place
    seen: str
    fix: str
    predicted_us: float | None = None
    numbers: dict[str, float | int | str] = field(default_factory=dict)

    def __str__(self) -> str:
        cost = "" if self.predicted_us is None else f" (predicted {self.predicted_us:.1f} us)"
        return f"{self.severity} {self.code} at {self.place}: {self.seen}{cost}; do: {self.fix}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def note(self) -> Noted:
        """Return it as an event of a report, which lists it among what to do."""
        seconds = None if self.predicted_us is None else self.predicted_us / 1e6
        warn = self.severity is Severity.WARNING
        return Noted(self.code, self.seen, self.place, warn, self.fix, seconds)


def by_importance(finding: LintFinding) -> tuple[bool, float]:
    """Return a key that sorts warnings first, then by predicted cost."""
    return finding.severity is not Severity.WARNING, -(finding.predicted_us or 0.0)
