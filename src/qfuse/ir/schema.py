"""Arguments of nodes by their schema's names, so that nothing depends on positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._ops import OpOverload

if TYPE_CHECKING:
    from torch.fx import Node
    from torch.fx.node import Argument

__all__ = ["arguments", "is_call", "overload_of"]


def overload_of(node: Node) -> OpOverload | None:
    """Return the op overload that ``node`` calls, or ``None``."""
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        return node.target
    return None


def is_call(value: object, *ops: OpOverload) -> bool:
    """Whether ``value`` is a node that calls one of ``ops``."""
    return getattr(value, "op", None) == "call_function" and getattr(value, "target", None) in ops


def arguments(node: Node) -> dict[str, Argument]:
    """Return every argument of ``node`` by name, defaults filled in.

    Works with the older schemas of third-party ops that lack trailing arguments: names that a
    schema does not have are simply not in the result.
    """
    op = overload_of(node)
    assert op is not None, f"not a call of an op: {node.format_node()}"
    bound: dict[str, Argument] = {}
    for index, formal in enumerate(op._schema.arguments):  # noqa: SLF001
        if index < len(node.args):
            bound[formal.name] = node.args[index]
        elif formal.name in node.kwargs:
            bound[formal.name] = node.kwargs[formal.name]
        elif formal.has_default_value():
            bound[formal.name] = formal.default_value
    return bound
