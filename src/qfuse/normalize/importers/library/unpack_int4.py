"""Unpack 4-bit weights from the layout of ``aten._convert_weight_to_int4pack_for_cpu``.

The layout depends on the instruction set. It is a permutation of nibbles within blocks of rows, so
packing the digits of each element's index tells where the element goes; packing the result again
confirms it.
"""

from __future__ import annotations

import torch

from qfuse.rewrite.prelude import aten

_ROWS = 64
_BITS = 4
_LOW = 15
_TILES = 1  # An argument that the CPU ignores.


def unpack_int4(packed: torch.Tensor, rows: int, k: int) -> torch.Tensor | None:
    """Return the values in [0, 15], uint8 ``[rows, k]``; ``None`` for another layout.

    Args:
        packed: ``[rows, k / 2]``, uint8.
        rows: Output features.
        k: Input features.
    """
    if tuple(packed.shape) != (rows, k // 2) or k % 2 or not rows:
        return None
    places: dict[int, torch.Tensor] = {}
    parts = []
    try:
        for block in torch.split(packed, _ROWS):
            count = block.shape[0]
            if count not in places:
                places[count] = _places(count, k)
            part = torch.empty(count * k, dtype=torch.uint8)
            part[places[count]] = _nibbles(block)
            parts.append(part.reshape(count, k))
        values = torch.cat(parts)
        again = aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), _TILES)
    except RuntimeError:
        # The op packs only some numbers of rows; what it does not pack, it did not write.
        return None
    return values if torch.equal(again, packed) else None


def _places(rows: int, k: int) -> torch.Tensor:
    """Return for every packed nibble the index of its element."""
    index = torch.arange(rows * k).reshape(rows, k)
    found = torch.zeros(rows * k, dtype=torch.int64)
    for shift in range(0, max(1, (rows * k - 1).bit_length()), _BITS):
        digit = ((index >> shift) & _LOW).to(torch.int32)
        packed = aten._convert_weight_to_int4pack_for_cpu(digit, _TILES)
        found |= _nibbles(packed).to(torch.int64) << shift
    return found


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the low and the high nibble of every byte, in order."""
    return torch.stack([packed & _LOW, packed >> _BITS], -1).reshape(-1)
