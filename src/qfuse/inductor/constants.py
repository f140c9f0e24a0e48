"""The constants of a graph at compile time: frozen weights, and nodes computed from them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from qfuse.inductor._inductor_api import folds
from qfuse.ir.graph.schema import overload_of


def is_pure(node: Node) -> bool:
    """Whether a call is deterministic and has no side effects."""
    op = overload_of(node)
    if op is None or op._schema.is_mutable:  # noqa: SLF001 - the way to ask
        return False
    return torch.Tag.nondeterministic_seeded not in op.tags and not node.is_impure()


class Constants:
    """The constants of a graph.

    Args:
        graph: The graph; its nodes must not change.
        values: The leaves that freezing turns into constants, with their values.
    """

    def __init__(self, graph: Graph, values: Mapping[Node, torch.Tensor]) -> None:
        self.values = values
        self._known: dict[Node, bool] = dict.fromkeys(values, True)
        for node in graph.nodes:
            if node.op == "call_function" and is_pure(node):
                # Freezing does not fold calls without operands, such as `full`.
                inputs = [self._known.get(source) for source in node.all_input_nodes]
                if inputs and None not in inputs and _is_static(node):
                    self._known[node] = all(inputs) and folds(node, values)

    def __contains__(self, node: Node) -> bool:
        """Whether a node is computed only from constants."""
        return node in self._known

    def folded(self, node: Node) -> bool:
        """Whether freezing folds a node; otherwise it is computed in every call."""
        return self._known.get(node, False)


def _is_static(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(isinstance(s, int) for s in value.shape)
