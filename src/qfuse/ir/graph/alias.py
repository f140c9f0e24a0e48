"""Which nodes share memory, and which memory is visible to the caller."""

from __future__ import annotations

import operator

from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import is_call, overload_of

# These return their argument or a view of it if they can.
_MAYBE_VIEWS = (
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.dropout.default,
    aten.lift_fresh.default,
    aten.type_as.default,
)


def memory_of(node: Node) -> Node:
    """Return the node that owns the memory of ``node``."""
    while may_alias(node):
        # In all of these ops the first operand is the one that is viewed.
        node = node.all_input_nodes[0]
    return node


def leaves_graph(node: Node) -> bool:
    """Whether ``node`` or a view of it is returned to the caller."""
    seen = {node}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                return True
            if user not in seen and may_alias(user):
                seen.add(user)
                stack.append(user)
    return False


def may_alias(node: Node) -> bool:
    """Whether ``node`` may alias its first input."""
    # Results of a split are views of its operand. Those of other ops are new, and counting them as
    # aliases is only more careful.
    if node.target is operator.getitem:
        return True
    op = overload_of(node)
    return op is not None and (bool(op.is_view) or is_call(node, *_MAYBE_VIEWS))
