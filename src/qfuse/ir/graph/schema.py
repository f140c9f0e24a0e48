"""Arguments of nodes by their schema names, independent of positions."""

from __future__ import annotations

from functools import cache

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

    Also works with older schemas of third-party ops that lack trailing arguments: names that a
    schema lacks are absent from the result.
    """
    op = overload_of(node)
    assert op is not None, f"not a call of an op: {node.format_node()}"
    bound: dict[str, Argument] = {}
    for index, (name, has_default, default) in enumerate(_formals(op)):
        if index < len(node.args):
            bound[name] = node.args[index]
        elif name in node.kwargs:
            bound[name] = node.kwargs[name]
        elif has_default:
            bound[name] = default
    return bound


def argument_names(op: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments of ``op``, in order."""
    return tuple(name for name, _, _ in _formals(op))


def argument_defaults(op: OpOverload) -> dict[str, Argument]:
    """Return the defaults of those arguments of ``op`` that have one."""
    return {name: default for name, has_default, default in _formals(op) if has_default}


@cache
def _formals(op: OpOverload) -> tuple[tuple[str, bool, Argument], ...]:
    """Return name and default of each argument; cached, because reading a schema is slow."""
    return tuple(
        (f.name, f.has_default_value(), _default(f) if f.has_default_value() else None)
        for f in op._schema.arguments  # noqa: SLF001
    )


def _default(formal: torch.Argument) -> Argument:
    """Return the default of an argument; that of a dtype as a dtype."""
    value: Argument = formal.default_value
    if str(formal.real_type) == "ScalarType" and isinstance(value, int):
        return _DTYPES[value]
    return value
