"""Casts between float dtypes, for rules that look through them."""

from __future__ import annotations

import torch

from qfuse.ir.dtypes import COMPUTE_DTYPES, widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import casts
from qfuse.ir.ops.views import dtype_of, node_of, tensor_of
from qfuse.ir.sizes import same_strides
from qfuse.rewrite.pattern import Step
from qfuse.rewrite.prelude import Node, arguments, aten


def besides_dtype(node: Node) -> list[str]:
    """Return what an ``aten._to_copy`` changes besides the dtype."""
    a = arguments(node)
    source = node_of(a["self"]).meta["val"]
    same = {
        "layout": torch.strided,
        "device": source.device,
        "memory_format": torch.preserve_format,
    }
    changed = [k for k, v in same.items() if a.get(k) is not None and a[k] != v]
    return [*changed, "pinning"] if a.get("pin_memory") else changed


def float_cast_source(node: Node) -> Node | None:
    """Return the operand of a cast between float dtypes, which may be equal; else ``None``.

    A copy of the same dtype that makes a strided tensor dense is not a cast: libraries use other
    formulas for functions and sums of a tensor with other strides, so the bits may change.
    """
    source = casts.cast_source(node)
    if is_call(node, aten.type_as.default):
        source = node_of(arguments(node)["self"])
    if source is None or not {dtype_of(source), dtype_of(node)} <= set(COMPUTE_DTYPES):
        return None
    moves = dtype_of(source) == dtype_of(node) and not same_strides(
        tensor_of(source), tensor_of(node)
    )
    return None if moves else source


def exact_cast_source(node: Node) -> Node | None:
    """Return the operand of a cast to a float dtype that represents all its values."""
    source = float_cast_source(node)
    return source if source is not None and widens(dtype_of(source), dtype_of(node)) else None


def exact_source(node: Node) -> Node:
    """Return the value behind casts that keep every value."""
    while (source := exact_cast_source(node)) is not None:
        node = source
    return node


_OPS = (aten._to_copy.default, aten.type_as.default)

FLOAT_CAST = Step("cast", float_cast_source, _OPS)
"""A cast from one float dtype to another."""

EXACT_CAST = Step("exact cast", exact_cast_source, _OPS)
"""A cast that keeps every value."""
