"""Arguments of nodes by their schema's names, so that nothing depends on positions."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

# Schemas keep the default of a dtype as its number in c10/core/ScalarType.h.
_DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
}


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
            bound[formal.name] = _default(formal)
    return bound


def _default(formal: torch.Argument) -> Argument:
    """Return the default of an argument; that of a dtype as a dtype."""
    value: Argument = formal.default_value
    if str(formal.real_type) == "ScalarType" and isinstance(value, int):
        return _DTYPES[value]
    return value
