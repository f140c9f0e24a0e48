"""Value numbering: which nodes of a graph compute the same value."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping

import torch
from torch.fx import Graph

from qfuse.inductor.constants import is_pure
from qfuse.ir.graph.alias import memory_of
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops.views import bytes_of
from qfuse.rewrite.prelude import Node, arguments, aten

_BITS_LIMIT = 1 << 16  # bytes; larger constants are equal only if they are the same tensor
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class Numbers:
    """The value number of every node; nodes with the same number have bitwise equal values.

    Args:
        graph: The graph; its nodes must not change.
        values: Values of constants. Small ones are compared by their bits.
    """

    def __init__(self, graph: Graph, values: Mapping[Node, torch.Tensor]) -> None:
        self._numbers: dict[Node, int] = {}
        self._known: dict[Hashable, int] = {}
        self._written = frozenset(_written(graph.nodes))
        for node in graph.nodes:
            key = self._key(node, values.get(node))
            self._numbers[node] = self._known.setdefault(key, len(self._known))

    def of(self, node: Node) -> int:
        """Return the value number of a node."""
        return self._numbers[node]

    def frozen(self, value: object) -> Hashable:
        """Make an argument hashable, with different keys for 1, 1.0 and True."""
        if isinstance(value, Node):
            return ("value", self._numbers[value])
        if isinstance(value, (list, tuple)):
            return tuple(map(self.frozen, value))
        if isinstance(value, torch.SymInt):
            return ("size", str(value.node.expr))
        return (type(value), repr(value))

    def _key(self, node: Node, value: torch.Tensor | None) -> Hashable:
        if value is not None:
            return _constant_key(value)
        # Two reads of a tensor that is written between them are two values.
        if node.op != "call_function" or self._reads_written(node):
            return node
        if node.target is operator.getitem:
            return (operator.getitem, self.frozen(node.args))
        if not is_pure(node):
            return node
        named = arguments(node)
        if is_call(node, *_RESHAPES):
            # Sizes may contain -1 or not; the result's shape is the canonical form.
            named = {"self": named["self"], "size": list(node.meta["val"].shape)}
            return ("reshape", *((k, self.frozen(v)) for k, v in named.items()))
        return (overload_of(node), *((k, self.frozen(v)) for k, v in sorted(named.items())))

    def _reads_written(self, node: Node) -> bool:
        if not self._written:
            return False
        return any(memory_of(source) in self._written for source in node.all_input_nodes)


def _written(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that are mutated before the end of the graph, which have several values."""
    found: set[Node] = set()
    waiting: list[Node] = []
    for node in nodes:
        op = overload_of(node)
        if op is not None and op._schema.is_mutable:  # noqa: SLF001 - the way to ask
            waiting += [memory_of(source) for source in node.all_input_nodes]
            # The functionalized graph ends in `copy_` to inputs and buffers. That changes no value
            # that is read, unless something is computed afterwards.
            if not is_call(node, aten.copy_.default):
                found.update(waiting)
        elif node.op != "output":
            found.update(waiting)
            waiting.clear()
    return found


def _constant_key(value: torch.Tensor) -> Hashable:
    kind = (value.dtype, str(value.device), tuple(value.shape), value.layout)
    # Opaque tensors, as packed by oneDNN, have no bits to read; the id is unique while the caller
    # of this class holds the values.
    if value.layout is not torch.strided or value.numel() * value.element_size() > _BITS_LIMIT:
        return (*kind, id(value))
    return (*kind, value.stride(), bytes_of(value))
