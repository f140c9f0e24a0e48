"""Packs int8 weights into the layout of the kernels, and unpacks them.

``[N, K]`` becomes ``[ceil(N / 64), ceil(K / 4), 64, 4]``, padded with zeros: blocks of 64 output
features, and within a block four consecutive ``k`` of each feature adjacent, as the dot product
instructions of every instruction set require. A packed weight is an ordinary int8 tensor with the
same layout on every machine, so it can be folded at compile time, saved, copied and shared.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qfuse.ir.dtypes import FLOAT8
from qfuse.ir.errors import InputError

BLOCK = 64
"""Output features per block."""

GROUP = 4
"""Adjacent input features."""


def pack_weight(
    weight: torch.Tensor, zero_point: torch.Tensor | None = None, *, halves: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack an int8 weight, and sum its rows.

    Args:
        weight: int8 ``[N, K]``.
        zero_point: ``[N]`` or one number, any integer dtype.
        halves: Whether the output features are two GLU halves, each of which starts a new block.

    Returns:
        The packed weight of :func:`pack_bytes`, and the sums of :func:`weight_sums`.

    Raises:
        InputError: The weight is not a 2-D int8 tensor, or has an odd number of features to halve.
    """
    return pack_bytes(weight, halves=halves), weight_sums(weight, zero_point)


def pack_bytes(weight: torch.Tensor, *, halves: bool = False) -> torch.Tensor:
    """Pack an int8 weight.

    Args:
        weight: int8 ``[N, K]``.
        halves: As for :func:`pack_weight`. No effect if a half consists of whole blocks.

    Returns:
        ``[ceil(N / 64), ceil(K / 4), 64, 4]``, contiguous; ``2 * ceil(N / 128)`` blocks if halved.

    Raises:
        InputError: The weight is not a 2-D int8 tensor, or has an odd number of features to halve.
    """
    if weight.dtype != torch.int8 or weight.dim() != 2:  # noqa: PLR2004
        raise InputError(
            f"a weight to pack must be int8 [N, K], not {weight.dtype} {tuple(weight.shape)}"
        )
    if not halves:
        return _blocks(weight)
    if weight.shape[0] % 2:
        raise InputError(f"{weight.shape[0]} output features cannot be split into halves")
    return torch.cat([_blocks(part) for part in weight.chunk(2)])


def pack_floats(weight: torch.Tensor) -> torch.Tensor:
    """Pack a weight of floats of 8 or 16 bits.

    Args:
        weight: float8 or float16 ``[N, K]``.

    Returns:
        Of the same dtype, contiguous: float8 ``[ceil(N / 64), ceil(K / 4), 64, 4]``, float16
        ``[ceil(N / 64), 2 * ceil(K / 4), 64, 2]``.

    Raises:
        InputError: The weight is not 2-D, or of another dtype.
    """
    if weight.dtype in FLOAT8:
        # torch does not pad float8, and the bits of 0.0 are those of the integer.
        return pack_bytes(weight.contiguous().view(torch.int8)).view(weight.dtype)
    if weight.dtype is not torch.float16 or weight.dim() != 2:  # noqa: PLR2004
        raise InputError(
            f"a float weight to pack must be float8 or float16 [N, K], not {weight.dtype} "
            f"{tuple(weight.shape)}"
        )
    n, k = weight.shape
    padded = F.pad(weight, (0, -k % GROUP, 0, -n % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // 2, 2)
    return blocks.permute(0, 2, 1, 3).contiguous()


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    n, k = weight.shape
    # Zeros add nothing to the sums, and the results of padded features are not stored.
    padded = F.pad(weight, (0, -k % GROUP, 0, -n % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // GROUP, GROUP)
    return blocks.permute(0, 2, 1, 3).contiguous()


def weight_sums(weight: torch.Tensor, zero_point: torch.Tensor | None = None) -> torch.Tensor:
    """Sum the rows of a weight; kernels use it to correct for the activation's zero point.

    Args:
        weight: int8 ``[N, K]``.
        zero_point: ``[N]`` or one number, any integer dtype.

    Returns:
        int32 ``[N]``: for each output feature the sum over ``k`` of ``weight - zero_point``.
    """
    # The zero point of `x` contributes x_zero_point * sum(w - w_zero_point) to each result. The sum
    # is at most 2^23 for the K that kernels accept.
    sums = weight.sum(1, dtype=torch.int32)
    if zero_point is None:
        return sums
    return sums - zero_point.to(torch.int32).reshape(-1) * weight.shape[1]


def unpack_weight(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Undo :func:`pack_weight`, bit for bit.

    Args:
        packed: int8 ``[ceil(n / 64), ceil(k / 4), 64, 4]``.
        n: Output features.
        k: Input features.

    Returns:
        int8 ``[n, k]``, contiguous.

    Raises:
        InputError: The packed weight does not have that size.
    """
    expected = (-(-n // BLOCK), -(-k // GROUP), BLOCK, GROUP)
    if packed.dtype != torch.int8 or tuple(packed.shape) != expected:
        raise InputError(
            f"a packed weight of n={n}, k={k} is int8 {expected}, "
            f"not {packed.dtype} {tuple(packed.shape)}"
        )
    rows = packed.permute(0, 2, 1, 3).reshape(expected[0] * BLOCK, expected[1] * GROUP)
    return rows[:n, :k].contiguous()
