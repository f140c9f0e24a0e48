"""Copy a program so that it can be rewritten independently."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TypeVar

from qfuse.ir.events import EventLog
from qfuse.ir.graph.buffers import with_graph
from qfuse.ir.graph.stage_graph import StageGraph

P = TypeVar("P", bound="StageGraph")


def clone(program: P) -> P:
    """Return a copy with a graph and a log of its own; constants and fake values are shared."""
    # Rewrites add constants and never write one, so two graphs may share them.
    written = [mutation.buffer for mutation in program.signature.mutations]
    module = with_graph(program.module, copy.deepcopy(program.graph), written)
    return replace(program, module=module, log=EventLog(program.log))
