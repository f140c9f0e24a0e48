"""Elementwise values that several kernels read.

Inductor computes an elementwise op in the loops that read it. For an operand of a custom op, whose
strides are fixed, that is a copy of its own: an attention mask was computed once per layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from qfuse.backends.aliases import replaced_node, viewed_node
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.sizes import is_row_major


def stored_strides(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shape and strides of an elementwise value that is to be stored for several kernels.

    A view of it by ``aten.as_strided`` makes Inductor store it. Row-major values of static shape
    only: that is how Inductor stores what it is not told how to.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not _is_elementwise(node):
        return None
    shape = tuple(value.shape)
    # Axes of one element may have other strides.
    static = all(isinstance(size, int) for size in shape) and value.is_contiguous()
    if not static or not is_row_major(value) or any(user.op == "output" for user in node.users):
        return None
    return (shape, tuple(value.stride())) if len(set(_kernels(node))) > 1 else None


def _is_elementwise(node: Node) -> bool:
    """Whether Inductor computes ``node`` in the loops that read it, for each of them."""
    op = overload_of(node)
    if op is None:
        return False
    source = viewed_node(node) or replaced_node(node)
    if source is not None:
        return _dtype(source) != _dtype(node)  # a cast, not a view, nor what compilers remove
    return torch.Tag.pointwise in op.tags


def _kernels(node: Node) -> Iterator[Node]:
    """Yield the calls of custom ops that read ``node``, or a view of it."""
    for user in node.users:
        op = overload_of(user)
        if op is not None and op.namespace == "qfuse":
            yield user
        elif viewed_node(user) is node and _dtype(user) == _dtype(node):
            yield from _kernels(user)


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
