"""Copy a program so that it can be rewritten independently."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TypeVar

from torch.fx import GraphModule

from qfuse.ir.events import EventLog
from qfuse.ir.graph.stage_graph import StageGraph

P = TypeVar("P", bound="StageGraph")


def clone(program: P) -> P:
    """Return a copy with a graph and a log of its own; constants and fake values are shared."""
    # Rewrites add constants and never write one, so two graphs may share them.
    module = GraphModule(program.module, copy.deepcopy(program.graph))
    return replace(program, module=module, log=EventLog(program.log))
