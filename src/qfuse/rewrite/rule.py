"""The interface of a rewrite rule: a pure match, a price, then one edit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

from torch._ops import OpOverload
from torch.fx import Node

from qfuse.cost.model import CostModel
from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.rewriter import Rewriter

S = TypeVar("S")


class Miss(Refusal):
    """Why a rule did not fire: a code, the failing node, and a lazily formatted message.

    Args:
        code: A stable code for tools and tests.
        at: The node at which the match failed.
        template: A ``str.format`` template.
        values: The positional arguments of the template.
        progress: How far the match came; the report shows the rule that came furthest. 0 means
            that the root did not match, and is not reported. Patterns compute it.
        fields: The keyword arguments of the template.

    Attributes:
        held: Number of conditions of the pattern that hold.
        conditions: The fewest that have to hold on the way that was tried; 0 if the rule does not
            use a pattern.
        trace: The pattern parts from the root to the one that failed; empty if the rule does not
            use a pattern. :func:`qfuse.rewrite.pattern.explain_miss` shows it.
    """

    __slots__ = (
        *("_fields", "_template", "_values", "at", "code"),
        *("conditions", "held", "progress", "trace"),
    )

    def __init__(
        self,
        code: MissCode,
        at: Node,
        template: str,
        *values: object,
        progress: int = 1,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        self.code = code
        self.at = at
        self.progress = progress
        self.held = self.conditions = 0
        self.trace: tuple[object, ...] = ()
        self._template = template
        self._values = values
        self._fields = fields or {}

    @property
    def reason(self) -> str:
        """The formatted message."""
        return self._template.format(*self._values, **self._fields)

    def __repr__(self) -> str:
        return f"Miss({self.code.value}, %{self.at.name}: {self.reason})"


class Rule(ABC, Generic[S]):
    """One local rewrite, anchored on a few ops. Stateless: one instance serves many graphs.

    Attributes:
        name: Hyphenated verb phrase, unique.
        anchors: The ops that ``match`` is called for.
        exactness: The most that the rewrite may change values.
        proof: What a check by values can verify; differs from ``exactness`` only if a library
            computes the same expression differently for another shape.
    """

    name: ClassVar[str]
    anchors: ClassVar[tuple[OpOverload, ...]]
    exactness: ClassVar[Exactness]
    proof: ClassVar[Exactness | None] = None

    @abstractmethod
    def match(self, node: Node) -> S | Miss:
        """Match without editing the graph. Legality is decided here and nowhere else."""

    def gain(self, site: S, cost: CostModel) -> float | None:
        """Return the seconds that firing saves per call; ``None`` means always worth it."""
        del site, cost
        return None

    @abstractmethod
    def rewrite(self, site: S, rw: Rewriter) -> None:
        """Edit the graph through ``rw`` only."""
