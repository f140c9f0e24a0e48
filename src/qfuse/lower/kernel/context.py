"""What every part of the lowering of one graph works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qfuse.cost.model import CostModel
from qfuse.ir.graph.stage_graph import StageGraph, SymbolRange
from qfuse.rewrite.driver import RewriteContext
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.targets.target import Target


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """What every part of the lowering of one graph works with.

    Attributes:
        program: The graph.
        target: Where it will run.
        cost: Prices kernels.
        editor: Edits the graph.
        context: Permissions and proof.
    """

    program: StageGraph
    target: Target
    cost: CostModel
    editor: GraphEditor
    context: RewriteContext

    @property
    def symbols(self) -> Mapping[str, SymbolRange]:
        """The sizes that a call may bring."""
        return self.program.signature.symbols
