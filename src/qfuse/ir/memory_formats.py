"""Memory formats of tensors by rank."""

from __future__ import annotations

from itertools import pairwise

import torch

from qfuse.ir.sizes import is_row_major, same_size

CHANNELS = 1
"""The axis of the channels of images ``[N, C, *S]``."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def formats_of_rank(rank: int) -> tuple[torch.memory_format, ...]:
    """Return the memory formats that a tensor of ``rank`` axes can have."""
    last = _CHANNELS_LAST.get(rank)
    return (torch.contiguous_format,) if last is None else (torch.contiguous_format, last)


def channels_last_of(rank: int) -> torch.memory_format | None:
    """Return the channels-last format for ``rank`` axes, if there is one."""
    return _CHANNELS_LAST.get(rank)


def has_fastest_channels(value: torch.Tensor) -> bool:
    """Whether the channels of ``[N, C, *S]`` are adjacent, and its pixels in row-major order.

    Pixels may be further apart than their channels, as in a part of a split. Axes of size one do
    not count.
    """
    if value.dim() not in _CHANNELS_LAST:
        return False
    pixels = [axis for axis in (0, *range(2, value.dim())) if not same_size(value.shape[axis], 1)]
    if not same_size(value.shape[1], 1) and not same_size(value.stride(1), 1):
        return False
    return all(
        same_size(value.stride(outer), value.stride(inner) * value.shape[inner])
        for outer, inner in pairwise(pixels)
    )


def format_of(value: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format of a dense tensor; ``None`` if it has another layout."""
    if is_row_major(value):
        return torch.contiguous_format
    order = (0, *range(2, value.dim()), 1)
    last = channels_last_of(value.dim())
    return last if last is not None and is_row_major(value.permute(order)) else None
