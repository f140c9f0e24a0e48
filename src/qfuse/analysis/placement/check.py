"""The interface of the checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch.fx import Node

from qfuse.analysis.placement.finding import LintFinding, Severity
from qfuse.analysis.placement.graph import LintGraph
from qfuse.ir.graph.stage_graph import place_of


class LintCheck(ABC):
    """Looks for one kind of problem.

    Attributes:
        code: Stable name of its findings.
        severity: Their severity.
    """

    code: ClassVar[str]
    severity: ClassVar[Severity] = Severity.WARNING

    @abstractmethod
    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Yield the findings in a model."""

    def finding(
        self,
        node: Node,
        seen: str,
        fix: str,
        predicted_us: float | None = None,
        *,
        lost_db: float | None = None,
        **numbers: float | str,
    ) -> LintFinding:
        """Return a finding at ``node``.

        Args:
            node: The guilty node.
            seen: What was seen.
            fix: What to change.
            predicted_us: What the change saves per call.
            lost_db: Decibels that the tensor loses.
            **numbers: The numbers behind ``seen``.
        """
        # A change that saves nothing here may still repair accuracy.
        saved = None if predicted_us is None else max(predicted_us, 0.0)
        place = place_of(node)
        return LintFinding(self.code, self.severity, place, seen, fix, saved, lost_db, numbers)
