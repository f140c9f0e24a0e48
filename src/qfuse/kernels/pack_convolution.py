"""Packs int8 weights of convolutions into the layout of the kernels, and unpacks them.

A convolution is the product of a weight ``[N, K]`` and patches of the input, with ``K`` in the
order tap (z, y, x), then channel of the group. The weight of each group is packed as that of a
linear, see :mod:`qfuse.kernels.pack`.

A transposed convolution is one ordinary convolution for each phase: the output pixels whose
position plus padding has the same remainder by the stride, in the order of these remainders (z, y,
x). They read the same taps, the last one first. The weights of the phases follow one another.

Weight-only kernels take the weights of all groups as one matrix (:func:`pack_values`), so that no
block is filled up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import torch
import torch.nn.functional as F

from qfuse.ir.errors import InputError
from qfuse.kernels.pack import GROUP, pack_bytes, pack_floats, unpack_weight, weight_sums
from qfuse.kernels.pack4 import pack_weight4

_LEAST_AXES, _MOST_AXES = 3, 5
_LEAST_LINE = 3  # taps along x that begin a new group


def pack_convolution(weight: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Pack the weight of a convolution.

    Args:
        weight: int8 ``[N, C / groups, *kernel]``.
        groups: Groups of channels.

    Returns:
        int8 ``[groups, ceil(N / groups / 64), ceil(K / 4), 64, 4]`` with
        ``K = taps * C / groups``, contiguous, padded with zeros.

    Raises:
        InputError: The weight is not int8, has another number of axes, or cannot be split into
            groups.
    """
    matrix = as_matrix(weight)
    if groups < 1 or matrix.shape[0] % groups:
        raise InputError(f"{matrix.shape[0]} output channels cannot be split into {groups} groups")
    return torch.stack([pack_bytes(part) for part in matrix.tensor_split(groups)])


def convolution_sums(weight: torch.Tensor, zero_point: torch.Tensor | None = None) -> torch.Tensor:
    """Sum the weights of each output channel, to correct for the zero point of ``x``.

    Args:
        weight: int8 ``[N, C / groups, *kernel]``.
        zero_point: ``[N]`` or one number, any integer dtype.

    Returns:
        int32 ``[N]``: the sums of ``weight - zero_point``.
    """
    return weight_sums(as_matrix(weight), zero_point)


def unpack_convolution(packed: torch.Tensor, shape: Sequence[int], groups: int = 1) -> torch.Tensor:
    """Undo :func:`pack_convolution`, bit for bit.

    Args:
        packed: The packed weight.
        shape: Of the weight, ``[N, C / groups, *kernel]``.
        groups: Groups of channels.

    Returns:
        int8 of that shape, contiguous.

    Raises:
        InputError: The packed weight does not have that size.
    """
    n, channels, *kernel = shape
    if packed.shape[0] != groups or n % groups:
        raise InputError(f"a packed weight of {packed.shape[0]} groups, not {groups}, for n={n}")
    parts = [unpack_weight(part, n // groups, prod(kernel) * channels) for part in packed]
    return torch.cat(parts).reshape(n, *kernel, channels).movedim(-1, 1).contiguous()


def pack_transposed(
    weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int = 1
) -> torch.Tensor:
    """Pack the weight of a transposed convolution.

    Args:
        weight: int8 ``[C, N / groups, *kernel]``.
        stride: One number per spatial axis.
        dilation: One number per spatial axis.
        groups: Groups of channels.

    Returns:
        int8 ``[groups, ceil(N / groups / 64), sum of ceil(K / 4) over the phases, 64, 4]``,
        contiguous.

    Raises:
        InputError: As for :func:`pack_convolution`.
    """
    phases = [
        pack_convolution(part, groups) for part in phase_weights(weight, stride, dilation, groups)
    ]
    return torch.cat(phases, dim=2)


def transposed_sums(
    weight: torch.Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the weights of each output channel of each phase; see :func:`convolution_sums`.

    Returns:
        int32 ``[phases, N]``.
    """
    parts = phase_weights(weight, stride, dilation, groups)
    return torch.stack([convolution_sums(part, zero_point) for part in parts])


def pack_depthwise(weight: torch.Tensor) -> torch.Tensor:
    """Pack the weight of a depthwise convolution.

    Taps are in the order z, y, x, in groups of four that are adjacent for each output channel. If
    the kernel has three or more taps along x, each line of them begins a new group. Channels of a
    block are in the order in which instructions interleave bytes: the first four of every 16, the
    next four, and so on.

    Args:
        weight: int8 ``[N, 1, *kernel]``.

    Returns:
        int8 ``[ceil(N / 64), groups of taps, 64, 4]``, contiguous, padded with zeros.

    Raises:
        InputError: The weight is not int8, has another number of axes or of input channels.
    """
    _check_axes(weight)
    if weight.shape[1] != 1:
        raise InputError(f"a depthwise weight has one input channel, not {weight.shape[1]}")
    lines = weight.reshape(weight.shape[0], prod(weight.shape[2:-1]), weight.shape[-1])
    # Of a group of four, a line of one or two taps would waste half or more.
    if lines.shape[-1] >= _LEAST_LINE:
        lines = F.pad(lines, (0, -lines.shape[-1] % GROUP))
    packed = pack_bytes(lines.flatten(1))
    quarters = packed.reshape(*packed.shape[:2], 4, 4, 4, GROUP).transpose(2, 3)
    return quarters.reshape(packed.shape)


def pack_values(values: torch.Tensor) -> torch.Tensor:
    """Pack the weight of a convolution of float activations, whatever its groups.

    Args:
        values: int8 ``[N, C / groups, *kernel]``, or uint8 from 0 to 15 for four bits.

    Returns:
        ``[ceil(N / 64), words, 64, 4]`` in the dtype of the values, padded with zeros. A word holds
        four int8 or eight values of four bits.

    Raises:
        InputError: The values have another dtype or number of axes.
    """
    matrix = as_matrix(values)
    if values.dtype.is_floating_point:
        return pack_floats(matrix)
    return pack_weight4(matrix) if values.dtype == torch.uint8 else pack_bytes(matrix)


def pack_transposed_values(
    values: torch.Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int = 1
) -> torch.Tensor:
    """Pack the weight ``[C, N / groups, *kernel]`` of a transposed one; see :func:`pack_values`.

    Returns:
        ``[ceil(N / 64), words of all phases, 64, 4]``.

    Raises:
        InputError: As for :func:`pack_values`, or the weight cannot be split into groups.
    """
    parts = phase_weights(values, stride, dilation, groups)
    return torch.cat([pack_values(part) for part in parts], dim=1)


def depthwise_groups(kernel: Sequence[int]) -> int:
    """Return the groups of taps of a weight that :func:`pack_depthwise` packs."""
    *lines, taps = kernel
    if taps >= _LEAST_LINE:
        return prod(lines) * -(-taps // GROUP)
    return -(-prod(kernel) // GROUP)


def taps_of_phases(
    kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[tuple[list[int], ...]]:
    """Return the taps of every phase of a transposed convolution, one list per axis."""
    axes = [
        # A tap t adds input i to output i * s + t * d -
        # padding: only taps with the same remainder meet.
        [[t for t in reversed(range(k)) if (t * d - rest) % s == 0] for rest in range(s)]
        for k, s, d in zip(kernel, stride, dilation, strict=True)
    ]
    return list(product(*axes))


def phase_weights(
    weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> list[torch.Tensor]:
    """Return the weight ``[N, C / groups, *taps]`` of every phase of a transposed convolution."""
    _check_axes(weight)
    if groups < 1 or weight.shape[0] % groups:
        raise InputError(f"{weight.shape[0]} channels cannot be split into {groups} groups")
    # As that of an ordinary convolution: [N, C / groups, *kernel].
    split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    ordinary = split.transpose(1, 2).flatten(0, 1)
    phases = []
    for taps in taps_of_phases(weight.shape[2:], stride, dilation):
        part = ordinary
        for axis, picked in enumerate(taps):
            part = part.index_select(2 + axis, torch.tensor(picked, dtype=torch.int64))
        phases.append(part)
    return phases


def as_matrix(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as a matrix ``[N, taps * C / groups]``."""
    _check_axes(weight)
    # Tap, then channel: in a channels-last image the channels of a tap are adjacent.
    return weight.movedim(1, -1).flatten(1)


def _check_axes(weight: torch.Tensor) -> None:
    if not _LEAST_AXES <= weight.dim() <= _MOST_AXES:
        raise InputError(
            f"the weight of a convolution has 1 to 3 spatial axes, not {weight.dim() - 2}"
        )
