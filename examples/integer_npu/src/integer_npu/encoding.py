"""Arguments and functions of calls as JSON, for files without code."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from qfuse.ir.errors import BackendError
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.prelude import OpOverload

# What a file may name besides ops: arithmetic on sizes, and the results of ops.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in ("add", "floordiv", "getitem", "mod", "mul", "neg", "sub", "truediv")
} | {
    f"torch.{name}": getattr(torch, name) for name in ("sym_float", "sym_int", "sym_max", "sym_min")
}
_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def name_of(target: object) -> str | None:
    """Return the name of an op or of a known function, or ``None``."""
    if isinstance(target, OpOverload):
        return f"ops.{target}"
    return next((name for name, known in _FUNCTIONS.items() if known is target), None)


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a name.

    Raises:
        BackendError: This version of torch, or this process, does not have the op.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise BackendError(f"there is no op {name}", fix="import the package that defines it")
    return found


def encode(value: Any, nodes: Mapping[Node, int]) -> Any:  # noqa: PLR0911 - one per type
    """Return an argument as JSON, or a refusal if it has no form there."""
    if isinstance(value, Node):
        return {"node": nodes[value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        parts = [encode(part, nodes) for part in value]
        return next((part for part in parts if isinstance(part, Refusal)), parts)
    if isinstance(value, Mapping):
        named = {key: encode(part, nodes) for key, part in value.items()}
        return next((part for part in named.values() if isinstance(part, Refusal)), {"map": named})
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, known in _KINDS.items():
        if isinstance(value, known):
            return {kind: str(value).removeprefix("torch.")}
    return Refusal(f"{value!r} has no form in a file")


def decode(value: Any, values: Sequence[Any]) -> Any:  # noqa: PLR0911 - one per type
    """Return an argument, with the values of earlier steps in place of nodes."""
    if isinstance(value, list):
        return [decode(part, values) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, part),) = value.items()
    match kind:
        case "node":
            return values[part]
        case "float":
            return float(part)
        case "device":
            return torch.device(part)
        case "map":
            return {key: decode(each, values) for key, each in part.items()}
        case _:
            return getattr(torch, part)
