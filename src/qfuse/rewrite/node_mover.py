"""Apply movements to nodes of a graph."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from qfuse.ir.ops.views import shape_of
from qfuse.rewrite.rewriter import Rewriter


class NodeMover:
    """Applies ops to nodes of a graph.

    Args:
        rw: Adds the nodes.
    """

    def __init__(self, rw: Rewriter) -> None:
        self._rw = rw

    def call(self, op: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply an op."""
        return self._rw.call(op, value, *args, **kwargs)

    def sizes(self, node: Node) -> list[Any]:
        """Return the sizes of a node's value: numbers, or nodes where they are dynamic."""
        return self._rw.sizes(node, len(shape_of(node)))

    def at_run_time(self, value: Any) -> Node:
        """Return the node of a value."""
        assert isinstance(value, Node), "values are nodes"
        return value
