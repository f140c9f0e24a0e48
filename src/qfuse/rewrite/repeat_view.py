"""Views, and the same views of another tensor."""

from __future__ import annotations

import operator

from torch.fx.node import map_arg

from qfuse.ir.graph.schema import arguments, is_call, overload_of
from qfuse.ir.movement.registry import SPLITS
from qfuse.ir.ops.view_ops import RESHAPES, TURNS
from qfuse.ir.ops.views import node_of
from qfuse.rewrite.prelude import Node, Rewriter

_VIEWS = (*RESHAPES, *TURNS, *SPLITS)


def viewed(node: Node) -> Node | None:
    """Return the operand of a reshape, transpose or split; for a part of a split, the split."""
    if node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, Node) and is_call(source, *SPLITS) else None
    return node_of(arguments(node)["self"]) if is_call(node, *_VIEWS) else None


def repeat_view(view: Node, other: Node, rw: Rewriter) -> Node:
    """Add the same view of ``other``, which has the shape of its operand.

    A copy is repeated too, although :func:`viewed` does not count it as a view.
    """
    if view.target is operator.getitem:
        index = view.args[1]
        assert isinstance(index, int), "a part of a split is named by its place"
        return rw.item(other, index)
    op, source = overload_of(view), arguments(view)["self"]
    assert op is not None, "a view is a call of an op"
    args, kwargs = map_arg((view.args, view.kwargs), lambda n: other if n is source else n)
    return rw.call(op, *args, **kwargs)
