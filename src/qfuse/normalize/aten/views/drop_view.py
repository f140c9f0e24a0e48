"""Drop views that keep the shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.ops.views import node_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.normalize.match.views import VIEWS
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)


@dataclass(frozen=True, slots=True)
class IdleView:
    """A view, and the node of the same shape that it is a view of."""

    node: Node
    source: Node


class DropView(Rule[IdleView]):
    """``view(x)``, ``expand(x)`` and similar views become ``x`` where the shape stays the same.

    Refuses: a view that changes the shape; a view of an input or a constant that is a graph output,
    since the graph would then return that tensor itself.
    """

    name = "drop-view"
    anchors: ClassVar[tuple[OpOverload, ...]] = (*VIEWS, torch.ops.aten.expand.default)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> IdleView | Miss:
        """Match a view that keeps the shape for any input."""
        source = node_of(arguments(node)["self"])
        # For all sizes: a symbol that was 1 in the example may be another number in a call.
        if not same_shape(shape_of(source), shape_of(node)):
            return Miss(MissCode.SHAPE, node, "it changes the shape", progress=0)
        leaves = any(user.op == "output" for user in node.users)
        if leaves and source.op != "call_function":
            text = "the caller gets a view of {}, not the tensor itself"
            return Miss(MissCode.SHARED, source, text, source.name, progress=0)
        return IdleView(node, source)

    def rewrite(self, site: IdleView, rw: Rewriter) -> None:
        """Replace all uses by the operand."""
        rw.replace(site.node, site.source)
