"""Which tensors share memory, and how values are written into memory that others may show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def address_of(value: torch.Tensor) -> int:
    """Return the address of the memory that ``value`` lives in, 0 if it has none."""
    return value.untyped_storage().data_ptr()


def write_values(
    targets: Sequence[torch.Tensor], sources: Sequence[int], values: Sequence[Any]
) -> list[Any]:
    """Write some of a graph's values to where the source program writes them.

    Args:
        targets: What is written.
        sources: For each target the position of its new value among ``values``.
        values: What the graph gave. All of them are from before the first write, so those that
            share memory with a target are copied first.

    Returns:
        ``values``, with the copies that were made.
    """
    owned = {address_of(target) for target in targets} - {0}
    free = [
        v.clone() if isinstance(v, torch.Tensor) and address_of(v) in owned else v for v in values
    ]
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(free[source])
    return free
