"""Which values may share memory after a compilation: views, and ops that compilers remove."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch.fx import Node

from qfuse.ir.graph.schema import arguments, overload_of

# Ops that Inductor removes if they are no-ops, and the argument that replaces them; besides these,
# `_to_copy` and the copying variants of views.
_SAME_VALUE = {
    "aten::cat": 0,
    "aten::ceil": 0,
    "aten::clone": 0,
    "aten::constant_pad_nd": 0,
    "aten::copy": 1,
    "aten::floor": 0,
    "aten::index_copy": None,
    "aten::pow": 0,
    "aten::repeat": 0,
    "aten::round": 0,
    "aten::slice_scatter": 1,
    "aten::trunc": 0,
}


def root_of(node: Node, step: Callable[[Node], Node | None]) -> Node:
    """Apply ``step`` until it returns no node."""
    while (base := step(node)) is not None:
        node = base
    return node


def viewed_node(node: Node) -> Node | None:
    """Return the node that ``node`` may be a view of."""
    if node.target is operator.getitem:
        assert isinstance(node.args[0], Node), "an item is taken of a node"
        return node.args[0]
    op = overload_of(node)
    if op is None or not any(result.alias_info for result in op._schema.returns):  # noqa: SLF001
        return None
    for argument in op._schema.arguments:  # noqa: SLF001
        if argument.alias_info:
            value = arguments(node).get(argument.name)
            return value if isinstance(value, Node) else None
    return None


def replaced_node(node: Node) -> Node | None:
    """Return the node that a compiler may replace ``node`` with: its base, or an equal value."""
    base = viewed_node(node)
    op = overload_of(node)
    if base is not None or op is None:
        return base
    name = op._schema.name  # noqa: SLF001
    index = _SAME_VALUE.get(name, 0 if name.endswith("_copy") else None)
    if index is None or index >= len(node.args):
        return None
    value = node.args[index]
    if isinstance(value, (tuple, list)) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, Node) else None
