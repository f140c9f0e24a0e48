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
        lost_db: Decibels of signal-to-noise that the quantized tensor loses on the example, beside
            what the change leaves; ``None`` if the finding is not about accuracy.
        numbers: The numbers behind ``seen``, by names with units.
    """

    code: str
    severity: Severity
    place: Place
    seen: str
    fix: str
    predicted_us: float | None = None
    lost_db: float | None = None
    numbers: dict[str, float | int | str] = field(default_factory=dict)

    def __str__(self) -> str:
        cost = f" ({self.cost})" if self.cost else ""
        return f"{self.severity} {self.code} at {self.place}: {self.seen}{cost}; do: {self.fix}"

    @property
    def cost(self) -> str:
        """What it costs, in words."""
        return cost_text(self.predicted_us, self.lost_db)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def note(self) -> Noted:
        """Return it as an event of a report, which lists it among what to do."""
        seconds = None if self.predicted_us is None else self.predicted_us / 1e6
        warn = self.severity is Severity.WARNING
        # The time is a field of its own.
        lost = cost_text(None, self.lost_db)
        text = f"{self.seen} ({lost})" if lost else self.seen
        return Noted(self.code, text, self.place, warn, self.fix, seconds)


def cost_text(predicted_us: float | None, lost_db: float | None) -> str:
    """Return a predicted time per call and a loss of accuracy in words; "" if both are unknown."""
    parts = [] if predicted_us is None else [f"predicted {predicted_us:.1f} us per call"]
    return ", ".join(parts if lost_db is None else [*parts, f"{lost_db:.0f} dB lost"])


def by_importance(finding: LintFinding) -> tuple[bool, float, float]:
    """Return a key that sorts warnings first, then by predicted time and lost accuracy."""
    info = finding.severity is not Severity.WARNING
    return info, -(finding.predicted_us or 0.0), -(finding.lost_db or 0.0)
