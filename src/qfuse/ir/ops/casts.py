"""Casts that only change the dtype."""

from __future__ import annotations

import torch
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.views import node_of, tensor_of


def cast_source(value: object) -> Node | None:
    """Return the operand of a pure cast, a copy that changes only the dtype."""
    if not isinstance(value, Node) or not is_call(value, aten._to_copy.default):
        return None
    a = arguments(value)
    source = node_of(a["self"])
    here = tensor_of(source).device
    # A copy that also changes device, layout or strides is more than a cast.
    plain = (
        isinstance(a["dtype"], torch.dtype)
        and a.get("layout") in {None, torch.strided}
        and (a.get("device") is None or a.get("device") == here)
        and not a.get("pin_memory")
        and a.get("memory_format") in {None, torch.preserve_format}
    )
    return source if plain else None
