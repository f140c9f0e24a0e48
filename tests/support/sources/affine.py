"""Blocks and parameters of torchao's affine ops, for the tests of their rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

# Torch has the type at run time; its stubs do not.
UINT4: torch.dtype = getattr(torch, "uint4")  # noqa: B009


# Per tensor, per token, per channel, per group, in two axes, and axes of one or no elements.
_BLOCKS: list[tuple[tuple[int, ...], list[int]]] = [
    ((), []),
    ((7,), [7]),
    ((8,), [2]),
    ((3, 8), [3, 8]),
    ((3, 8), [1, 8]),
    ((3, 8), [3, 1]),
    ((3, 8), [1, 4]),
    ((4, 8), [2, 4]),
    ((1, 8), [1, 8]),
    ((3, 1), [1, 1]),
    ((2, 3, 8), [1, 1, 8]),
    ((2, 3, 8), [2, 3, 8]),
    ((2, 3, 4, 2), [1, 3, 4, 2]),
]
BLOCKS = st.sampled_from(_BLOCKS)
BLOCKS_OR_NOTHING = st.sampled_from([*_BLOCKS, ((0, 8), [1, 8]), ((0, 8), [1, 2])])
TARGETS = st.sampled_from(
    [
        (torch.int8, ()),
        (torch.int8, (-127, 127)),
        (torch.int8, (-8, 7)),
        (torch.int8, (-128.0, 127.0)),
        (torch.uint8, ()),
        (torch.uint8, (0, 15)),
        (UINT4, ()),
        (torch.int16, (-32768, 32767)),
        (torch.int16, (-100, 100)),
    ]
)


def grid_of(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """One entry per block."""
    return tuple(1 if b == -1 else size // b for size, b in zip(shape, block, strict=True))


def param_shape(shape: Sequence[int], block: Sequence[int], data: st.DataObject) -> tuple[int, ...]:
    """A shape that torchao takes for parameters: the grid, the grid without whole axes, flat."""
    grid = grid_of(shape, block)
    dropped = tuple(g for g, size, b in zip(grid, shape, block, strict=True) if b == 1 or b != size)
    return data.draw(st.sampled_from([grid, dropped, (math.prod(grid),)]))
