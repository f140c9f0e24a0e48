"""Which nodes share memory, and which memory a caller gets to see."""

from __future__ import annotations

import operator

from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import is_call, overload_of

# They give their argument back, or a view of it, whenever they can.
_MAYBE_VIEWS = (
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.type_as.default,
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
