"""A drawn graph with one symbolic number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text


@dataclass
class Case:
    """A graph, the sizes of its symbols, and a seed."""

    program: NormalGraph
    rows: int
    seed: int

    def __repr__(self) -> str:
        return f"m={self.rows} seed={self.seed}\n{to_text(self.program.graph)}"
