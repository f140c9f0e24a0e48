"""Packs weights with groupwise scales along K.

The quantized values have the layout of :mod:`qfuse.kernels.pack4` or :mod:`qfuse.kernels.pack`. The
parameters of each group, ``[N, groups]``, become ``[ceil(N / 64), groups, 64]``, padded with zeros:
those of a block of 64 output features are contiguous, in the order in which kernels read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from qfuse.ir.errors import InputError
from qfuse.kernels.pack import BLOCK, pack_weight
from qfuse.kernels.pack4 import pack_weight4

# Magnitudes. Only int8 sums can reach 2^15 exactly, and only as -2^15, which still fits int16.
_LARGEST_CODE, _LARGEST_BYTE, _LARGEST_SHORT = 15, 1 << 7, 1 << 15


class PackedGroups(NamedTuple):
    """A packed weight with its group parameters, in the order of the kernels' arguments.

    Attributes:
        weight: The packed values.
        sums: Sum of the values of each group; int16 if it cannot overflow, else int32.
        scale: Scale of each group, float32.
        zero_point: int8: one element, or one per group; ``None`` means 0.
    """

    weight: torch.Tensor
    sums: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None


def pack_groups(values: torch.Tensor) -> torch.Tensor:
    """Pack per-group parameters of each output feature.

    Args:
        values: ``[N, groups]`` of any dtype.

    Returns:
        ``[ceil(N / 64), groups, 64]``, contiguous.
    """
    n, groups = values.shape
    padded = F.pad(values, (0, 0, 0, -n % BLOCK))
    return padded.reshape(-1, BLOCK, groups).transpose(1, 2).contiguous()


def pack_grouped(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    *,
    halves: bool = False,
) -> PackedGroups:
    """Pack a weight with groupwise scales.

    Args:
        values: ``[N, K]``: uint8 from 0 to 15 for 4-bit weights, int8 for 8-bit weights.
        scale: float ``[N, groups]``; ``groups`` divides K.
        zero_point: ``[N, groups]``, or one element; from -128 to 127. ``None`` means 0.
        halves: Whether the output features are two GLU halves, each of which starts a new block.

    Raises:
        InputError: The tensors do not match each other.
    """
    n, k = values.shape
    groups = scale.shape[-1]
    if scale.shape != (n, groups) or not groups or k % groups:
        raise InputError(f"scales {tuple(scale.shape)} do not form groups of a weight [{n}, {k}]")
    if halves and n % 2:
        raise InputError(f"{n} output features cannot be split into halves")

    def packed(values: torch.Tensor, pack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        parts = values.chunk(2) if halves else (values,)
        return torch.cat([pack(part) for part in parts])

    four = values.dtype == torch.uint8
    length = k // groups
    most = length * (_LARGEST_CODE if four else _LARGEST_BYTE)
    sums = values.reshape(n, groups, length).sum(2, dtype=torch.int32)
    # Keep group parameters small: a matmul with one row is bound by reading them.
    sums = sums.to(torch.int16) if most <= _LARGEST_SHORT else sums
    zero = None if zero_point is None else _small(zero_point, (n, groups))
    return PackedGroups(
        packed(values, pack_weight4 if four else lambda part: pack_weight(part)[0]),
        packed(sums, pack_groups),
        packed(scale.float(), pack_groups),
        zero if zero is None or zero.dim() == 1 else packed(zero, pack_groups),
    )


def _small(zero: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return zero points as int8: ``[1]``, or of ``shape``."""
    # The cast wraps, so the result is compared with what it was made of.
    small = zero.to(torch.int8)
    if not torch.equal(small.to(zero.dtype), zero):
        raise InputError("a zero point of a weight is outside of [-128, 127]")
    if zero.numel() == 1:
        return small.reshape(1)
    if zero.shape != shape:
        raise InputError(f"zero points {tuple(zero.shape)} of a weight with groups {shape}")
    return small
