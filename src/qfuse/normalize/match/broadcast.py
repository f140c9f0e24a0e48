"""How a factor broadcasts over a tensor, decided by position and without guarding a symbol."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from qfuse.ir.quant.spec import Block
from qfuse.ir.sizes import Size, is_one, same_shape, same_size


class Broadcast(StrEnum):
    """How a factor broadcasts over a tensor of shape ``[..., N]``."""

    TENSOR = "per-tensor"
    CHANNEL = "per-channel"
    ROWS = "per-row"


def broadcast_of(factor: Sequence[Size], shape: Sequence[Size]) -> Broadcast | None:
    """Return how a factor of shape ``factor`` broadcasts over a tensor of ``shape``.

    Returns:
        ``None`` if it broadcasts in another way: along another axis, over some of the leading axes
        only, or so that the result is larger than the tensor. The axis is decided by position, not
        by size: ``[N, 1]`` on ``[N, N]`` is per row.
    """
    if len(factor) > len(shape):
        return None
    sizes = padded(factor, len(shape))
    if all(is_one(size) for size in sizes):
        return Broadcast.TENSOR
    lead, last = sizes[:-1], sizes[-1]
    # Sizes are compared without guards: a symbol that may happen to be 1 is not taken as 1.
    if all(is_one(size) for size in lead):
        return Broadcast.CHANNEL if same_size(last, shape[-1]) else None
    if is_one(last) and same_shape(lead, shape[:-1]):
        return Broadcast.ROWS
    return None


def is_per_feature(factor: Sequence[Size], shape: Sequence[Size]) -> bool:
    """Whether ``factor`` has one entry per index of the last axis of ``shape``, of any size."""
    if not factor or len(factor) > len(shape):
        return False
    return all(map(is_one, factor[:-1])) and same_size(factor[-1], shape[-1])


def block_of(shape: Sequence[Size], grid: Sequence[Size]) -> Block | None:
    """Return the block of a scale that broadcasts over a tensor, in the rank of the tensor.

    Args:
        shape: Shape of the quantized tensor.
        grid: Shape of the scale; missing leading axes count as 1.

    Returns:
        Per axis ``None`` where one scale covers the axis and 1 where each index has its own; or
        ``None`` if ``grid`` does not broadcast to ``shape``, or has one scale per element.
    """
    if len(grid) > len(shape):
        return None
    block: list[int | None] = []
    for size, count in zip(shape, padded(grid, len(shape)), strict=True):
        if is_one(count):
            block.append(None)
        elif same_size(size, count):
            block.append(1)
        else:
            return None
    return tuple(block) if None in block else None


def padded(grid: Sequence[Size], rank: int) -> tuple[Size, ...]:
    """Return ``grid`` padded with ones in front, as broadcasting aligns it."""
    return (*(1,) * (rank - len(grid)), *grid)
