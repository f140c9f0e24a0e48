"""Replace a value by one of other strides, with everything that shows its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qfuse.ir.movements import movement_of
from qfuse.ir.schema import is_call, overload_of
from qfuse.optimize.moving import GraphMover

if TYPE_CHECKING:
    from torch.fx import Node

    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["restride", "rigid_reader"]

_aten = torch.ops.aten
# Views of several results, each of which is told by its elements.
_SPLITS = (
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.chunk.default,
    _aten.unbind.int,
    _aten.tensor_split.sections,
)


def restride(old: Node, new: Node, rw: Rewriter) -> None:
    """Replace ``old`` by ``new``, which may have other strides, and its views by views of ``new``.

    A view that the new strides do not allow becomes a ``reshape``, which copies. Ops that compute
    read strided values as they are.

    Args:
        old: What is replaced.
        new: The same values.
        rw: Edits the graph.
    """
    stack = [(old, new)]
    while stack:
        before, after = stack.pop()
        readers = list(before.users)
        rw.replace(before, after)
        stack += [(r, _again(r, after, rw)) for r in readers if _shows(r, after)]


def rigid_reader(node: Node) -> Node | None:
    """Return a view of ``node`` that says something of its memory and not of its elements."""
    stack = [node]
    while stack:
        source = stack.pop()
        for reader in source.users:
            if is_call(reader, *_SPLITS):
                continue
            if _shows(reader, source):
                if movement_of(reader) is None:
                    return reader
                stack.append(reader)
    return None


def _shows(reader: Node, source: Node) -> bool:
    """Whether ``reader`` is a view of ``source``."""
    op = overload_of(reader)
    views = (_aten._unsafe_view.default, _aten.reshape.default)
    if op is None or not (op.is_view or is_call(reader, *views)):
        return False
    return isinstance(reader.meta["val"], torch.Tensor) and reader.all_input_nodes[0] is source


def _again(reader: Node, source: Node, rw: Rewriter) -> Node:
    movement = movement_of(reader)
    with rw.before(reader):
        if movement is None:
            op = overload_of(reader)
            assert op is not None, "a view is a call of an op"
            return rw.call(op, *reader.args, **reader.kwargs)
        made: Node = movement.again(GraphMover(rw), source)
    return made
