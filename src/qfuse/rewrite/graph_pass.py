"""Whole-graph passes, with the same result, events and permissions as rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from qfuse.ir.events import Exactness
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.rewrite.context import PassResult, RewriteContext


class Pass(ABC):
    """A rewrite that must see the whole graph: value numbering, merging siblings, folding.

    Attributes:
        name: Hyphenated verb phrase, unique.
        exactness: The most that the pass may change values.
    """

    name: ClassVar[str]
    exactness: ClassVar[Exactness]

    @abstractmethod
    def run(self, program: StageGraph, context: RewriteContext) -> PassResult:
        """Rewrite ``program`` in place, in time linear in its size."""
