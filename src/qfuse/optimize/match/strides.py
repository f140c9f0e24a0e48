"""Replace a value by one of other strides, with everything that shows its memory."""

from __future__ import annotations

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.movement.registry import movement_of
from qfuse.optimize.match.move_qparams import GraphMover
from qfuse.rewrite.prelude import Node, Rewriter, aten


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
    """Return a view of ``node`` that cannot be made again on other strides.

    It says something of memory and not of elements, as ``as_strided`` does; or it has several
    results, whose own views would have to be made again too.
    """
    stack = [node]
    while stack:
        source = stack.pop()
        for reader in source.users:
            if _shows(reader, source):
                if movement_of(reader) is None:
                    return reader
                stack.append(reader)
    return None


def _shows(reader: Node, source: Node) -> bool:
    """Whether ``reader`` is a view of ``source``."""
    op = overload_of(reader)
    views = (aten._unsafe_view.default, aten.reshape.default)
    if op is None or not (op.is_view or is_call(reader, *views)):
        return False
    return reader.all_input_nodes[0] is source


def _again(reader: Node, source: Node, rw: Rewriter) -> Node:
    movement = movement_of(reader)
    assert movement is not None, "a value with a rigid reader is not given other strides"
    with rw.before(reader):
        made: Node = movement.again(GraphMover(rw), source)
    return made
