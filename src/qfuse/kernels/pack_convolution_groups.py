"""Packs weights of int8 convolutions with scales per group of input channels.

The quantized values have the layout of :mod:`qfuse.kernels.pack_convolution`. Their parameters have
that of :mod:`qfuse.kernels.pack_groups`, for each group of the convolution by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.pack_convolution import as_matrix, phase_weights
from qfuse.kernels.pack_groups import pack_groups

_LARGEST_BYTE, _LARGEST_SHORT = 1 << 7, 1 << 15


def pack_channel_groups(values: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Pack the parameters of every output channel.

    Args:
        values: ``[N, scales]``, in the order of the packed weight: phase, tap, then channel.
        groups: Groups of the convolution.

    Returns:
        ``[groups, ceil(N / groups / 64), scales, 64]``, contiguous.
    """
    return torch.stack([pack_groups(part) for part in values.tensor_split(groups)])


def group_sums(weight: torch.Tensor, size: int, groups: int = 1) -> torch.Tensor:
    """Sum the weights of each group of input channels of each tap.

    Args:
        weight: int8 ``[N, C / groups, *kernel]``.
        size: Input channels that share a scale; divides ``C / groups``.
        groups: Groups of the convolution.

    Returns:
        As from :func:`pack_channel_groups`; int16 if it cannot overflow, else int32.

    Raises:
        InputError: The size does not divide the channels.
    """
    return pack_channel_groups(_sums(weight, size), groups)


def transposed_group_sums(
    weight: torch.Tensor,
    size: int,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> torch.Tensor:
    """Sum the weights of a transposed convolution, ``[C, N / groups, *kernel]``, by phase.

    See :func:`group_sums`.
    """
    parts = phase_weights(weight, stride, dilation, groups)
    return pack_channel_groups(torch.cat([_sums(part, size) for part in parts], dim=1), groups)


def _sums(weight: torch.Tensor, size: int) -> torch.Tensor:
    if size < 1 or weight.shape[1] % size:
        raise InputError(f"{weight.shape[1]} input channels cannot be split into groups of {size}")
    matrix = as_matrix(weight)
    sums = matrix.reshape(len(matrix), matrix.shape[1] // size, size).sum(2, dtype=torch.int32)
    return sums.to(torch.int16) if size * _LARGEST_BYTE <= _LARGEST_SHORT else sums
