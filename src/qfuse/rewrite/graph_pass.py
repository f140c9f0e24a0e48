"""Whole-graph passes, with the same result, events and permissions as rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch.fx import Node

from qfuse.ir.events import Exactness, Fired
from qfuse.ir.graph.stage_graph import StageGraph, place_of
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.rewriter import Rewriter
from qfuse.rewrite.session import Applied, RewriteSession


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

    def rewrite_at(
        self,
        node: Node,
        edit: Callable[[Rewriter], None],
        session: RewriteSession,
        *,
        proof: Exactness | None,
    ) -> bool:
        """Edit the graph at ``node``, and log that the pass fired; return whether it was kept.

        ``proof`` is as in :meth:`qfuse.rewrite.session.RewriteSession.rewrite`.
        """
        place, stage = place_of(node), session.context.stage

        def fired(key: str, rw: Rewriter, _: object) -> Fired:
            del rw
            return Fired(stage, self.name, key, self.exactness, (place,))

        done = session.rewrite(self.name, node, edit, proof=proof, event=fired)
        return isinstance(done, Applied)
