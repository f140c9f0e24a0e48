"""Which nodes share memory, and which memory a caller gets to see."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from qfuse.ir.schema import is_call, overload_of

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = ["leaves_graph", "memory_of"]

_aten = torch.ops.aten

# They give their argument back, or a view of it, whenever they can.
_MAYBE_VIEWS = (
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.contiguous.default,
    _aten.flatten.using_ints,
    _aten.to.dtype,
    _aten.to.dtype_layout,
    _aten.to.device,
    _aten.type_as.default,
)


def memory_of(node: Node) -> Node:
    """Return the node whose memory ``node`` shows."""
    while _may_alias(node):
        node = node.all_input_nodes[0]
    return node


def leaves_graph(node: Node) -> bool:
    """Whether the caller gets ``node`` or a view of it."""
    seen = {node}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                return True
            if user not in seen and _may_alias(user):
                seen.add(user)
                stack.append(user)
    return False


def _may_alias(node: Node) -> bool:
    """Whether ``node`` shows the memory of its first input."""
    if node.target is operator.getitem:
        return True
    op = overload_of(node)
    return op is not None and (bool(op.is_view) or is_call(node, *_MAYBE_VIEWS))
