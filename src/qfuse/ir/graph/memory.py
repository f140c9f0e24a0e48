"""Which tensors share memory, and how values are written into aliased memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def address_of(value: torch.Tensor) -> int:
    """Return the address of the storage of ``value``, 0 if it does not have one."""
    # A weight that a library packed is opaque.
    if value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()


def span_of(value: torch.Tensor) -> tuple[int, int]:
    """Return the address range of the elements of ``value``; empty for empty and meta tensors."""
    start = 0 if value.is_meta else value.data_ptr()
    if value.numel() == 0 or start == 0:
        return 0, 0
    if value.is_contiguous():
        return start, start + value.nbytes
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return start, start + (last + 1) * value.element_size()


def write_values(
    targets: Sequence[torch.Tensor], sources: Sequence[int], values: Sequence[Any]
) -> list[Any]:
    """Write values of a graph to the tensors that the source program mutates.

    Args:
        targets: The tensors to write.
        sources: For each target the position of its new value among ``values``.
        values: The results of the graph. All of them were computed before the first write, so
            those that share memory with a target are copied first.

    Returns:
        ``values``, with copied entries replaced by their copies.
    """
    # Empty and meta tensors have the address 0, and share nothing.
    owned = {address_of(target) for target in targets} - {0}
    free = [
        v.clone() if isinstance(v, torch.Tensor) and address_of(v) in owned else v for v in values
    ]
    # A target may be a parameter or an input that requires gradients.
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(free[source])
    return free
