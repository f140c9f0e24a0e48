"""What of a graph is known when it is compiled: frozen weights, and what is computed of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from qfuse.inductor._inductor_api import folds
from qfuse.ir.graph.schema import overload_of


def is_pure(node: Node) -> bool:
    """Whether a call gives the same for the same arguments, and does nothing else."""
    op = overload_of(node)
    if op is None or op._schema.is_mutable:  # noqa: SLF001 - the way to ask
        return False
    return torch.Tag.nondeterministic_seeded not in op.tags and not node.is_impure()


class Constants:
    """The constants of a graph.

    Args:
        graph: Its nodes are not changed meanwhile.
        values: The leaves: what freezing makes constants, with the values.
    """

    def __init__(self, graph: Graph, values: Mapping[Node, torch.Tensor]) -> None:
        self.values = values
        self._known: dict[Node, bool] = dict.fromkeys(values, True)
        for node in graph.nodes:
            if node.op == "call_function" and is_pure(node):
                # What reads nothing, as `full` does, freezing leaves where it is.
                inputs = [self._known.get(source) for source in node.all_input_nodes]
                if inputs and None not in inputs and _is_static(node):
                    self._known[node] = all(inputs) and folds(node, values)

    def __contains__(self, node: Node) -> bool:
        """Whether a node is computed of constants alone."""
        return node in self._known

    def folded(self, node: Node) -> bool:
        """Whether freezing computes a node now; else it is computed in every call."""
        return self._known.get(node, False)


def _is_static(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(isinstance(s, int) for s in value.shape)
