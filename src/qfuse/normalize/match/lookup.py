"""Rows of constants that are looked up by the same indices."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import node_of
from qfuse.normalize.match.views import view_source
from qfuse.rewrite.prelude import Node, arguments, aten

_STEPS = 8


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a constant.

    Attributes:
        table: The constant.
        by: The indices, and the axis where they are not along the first one.
    """

    table: Node
    by: tuple[Argument, ...]


def lookup_of(node: Node) -> Lookup | None:
    """View ``node`` as rows of a constant, through views; ``None`` if it is not."""
    for _ in range(_STEPS):
        found = _direct(node)
        if found is not None:
            return found if constant_of(found.table) is not None else None
        source = view_source(node)
        if source is None:
            return None
        node = source
    return None


def _direct(node: Node) -> Lookup | None:
    if is_call(node, aten.embedding.default):
        a = arguments(node)
        return Lookup(node_of(a["weight"]), (a["indices"],))
    if is_call(node, aten.index_select.default):
        a = arguments(node)
        return Lookup(node_of(a["self"]), (a["index"],)) if a["dim"] == 0 else None
    if is_call(node, aten.index.Tensor):
        a = arguments(node)
        indices = a["indices"]
        known = isinstance(indices, (list, tuple)) and len(indices) == 1
        return Lookup(node_of(a["self"]), tuple(indices)) if known else None  # type: ignore[arg-type]
    return None
