"""What a copy does besides casting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qfuse.ir.schema import arguments, is_call

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = ["also_changes", "float_cast"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def also_changes(node: Node) -> list[str]:
    """Return what an ``aten._to_copy`` changes besides the type, in words."""
    a = arguments(node)
    moved = [k for k in ("layout", "device", "memory_format") if _changes(a.get(k), node, k)]
    return moved or (["pinning"] if a.get("pin_memory") else [])


def float_cast(node: Node) -> torch.dtype | None:
    """Return the float type that a node casts a float to; ``None`` if it does anything else."""
    if not is_call(node, torch.ops.aten._to_copy.default) or also_changes(node):
        return None
    dtype = arguments(node)["dtype"]
    is_float = node.all_input_nodes[0].meta["val"].dtype in _FLOATS
    return dtype if is_float and isinstance(dtype, torch.dtype) and dtype in _FLOATS else None


def _changes(value: object, node: Node, name: str) -> bool:
    """Whether an argument of ``_to_copy`` asks for anything but what the tensor has."""
    if value is None:
        return False
    if name == "device":
        return bool(value != node.all_input_nodes[0].meta["val"].device)
    if name == "layout":
        return value is not torch.strided
    return value is not torch.preserve_format
