"""Packs 4-bit weights into the layout of the kernels, and unpacks them.

Values 0 to 15 of ``[N, K]`` become bytes ``[ceil(N / 64), ceil(K / 8), 64, 4]``, padded with
zeros: in a block of 64 output features, the byte ``[g, c, j]`` holds the value of feature ``c`` at
``k = 8 g + j`` in its low nibble, and the one at ``k = 8 g + 4 + j`` in its high nibble. Unpacked
to bytes, the low and high nibbles are two adjacent groups of :mod:`qfuse.kernels.pack`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qfuse.ir.errors import InputError
from qfuse.kernels.pack import BLOCK, GROUP

_PAIR = 2 * GROUP
_CODES = 16


def pack_weight4(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit values, two per byte.

    Args:
        codes: uint8 ``[N, K]``, 0 to 15.

    Returns:
        uint8 ``[ceil(N / 64), ceil(K / 8), 64, 4]``, contiguous.

    Raises:
        InputError: ``codes`` is not a 2-D uint8 tensor, or a value exceeds four bits.
    """
    if codes.dtype != torch.uint8 or codes.dim() != 2:  # noqa: PLR2004
        raise InputError(
            f"codes to pack must be uint8 [N, K], not {codes.dtype} {tuple(codes.shape)}"
        )
    if codes.numel() and int(codes.max()) >= _CODES:
        raise InputError(f"a code is {int(codes.max())}, four bits hold at most {_CODES - 1}")
    n, k = codes.shape
    padded = F.pad(codes, (0, -k % _PAIR, 0, -n % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // _PAIR, 2, GROUP)
    # So that one mask and one shift unpack a vector of bytes into two groups of four.
    low, high = blocks.permute(0, 2, 3, 1, 4).unbind(2)
    return (low | high << 4).contiguous()


def unpack_weight4(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Undo :func:`pack_weight4`, bit for bit.

    Args:
        packed: uint8 ``[ceil(n / 64), ceil(k / 8), 64, 4]``.
        n: Output features.
        k: Input features.

    Returns:
        uint8 ``[n, k]``, contiguous.

    Raises:
        InputError: The packed weight does not have that size.
    """
    expected = (-(-n // BLOCK), -(-k // _PAIR), BLOCK, GROUP)
    if packed.dtype != torch.uint8 or tuple(packed.shape) != expected:
        raise InputError(
            f"a packed weight of n={n}, k={k} is uint8 {expected}, "
            f"not {packed.dtype} {tuple(packed.shape)}"
        )
    both = torch.stack([packed & (_CODES - 1), packed >> 4], 2)
    rows = both.permute(0, 3, 1, 2, 4).reshape(expected[0] * BLOCK, expected[1] * _PAIR)
    return rows[:n, :k].contiguous()
