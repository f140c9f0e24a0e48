"""Memory layouts that compiled code requires of inputs, and conversion to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def size_hint(size: int | torch.SymInt) -> int:
    """Return the hint of a size without adding a guard; 2 if it has none."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose axes are stored in ``order``, slowest first.

    >>> dense_strides((2, 3, 4), (0, 1, 2))
    (12, 4, 1)
    >>> dense_strides((2, 3, 4), (0, 2, 1))
    (12, 1, 3)
    """
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        # torch computes strides as if an empty axis had one element.
        step = step * max(shape[axis], 1) if isinstance(shape[axis], int) else step * shape[axis]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Layout:
    """Dense strides in a fixed order of the axes.

    Attributes:
        order: Axes from the slowest to the fastest.
        strides: The strides, if every size is static.
        natural: Whether the order is that of the axes (C order).
    """

    order: tuple[int, ...]
    strides: tuple[int, ...] | None
    natural: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> Layout:
        """Return the layout of a (fake) tensor if it is dense, else C order.

        Axes of size one may have any stride, so they keep their position in C order.
        """
        shape = tuple(map(size_hint, value.shape))
        have = tuple(map(size_hint, value.stride()))
        natural = tuple(range(len(shape)))
        order = natural
        if not _same(shape, have, dense_strides(shape, natural)):
            sorted_axes = tuple(sorted(natural, key=lambda axis: -have[axis]))
            if _same(shape, have, dense_strides(shape, sorted_axes)):
                order = sorted_axes
        static = all(isinstance(size, int) for size in value.shape)
        return cls(order, dense_strides(shape, order) if static else None, order == natural)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or a view or copy of it, with exactly the strides of this layout.

        Strides of axes of size one are normalized too: no index depends on them, but a library
        that uses one as the leading dimension of a matrix would read out of bounds.
        """
        have = tensor.stride()
        if have == self.strides:
            return tensor
        # `is_contiguous` ignores the strides of axes of size one.
        if self.natural and 1 not in tensor.shape and tensor.is_contiguous():
            return tensor
        return self._laid_out(tensor, have)

    def _laid_out(self, tensor: torch.Tensor, have: tuple[int, ...]) -> torch.Tensor:
        want = dense_strides(tensor.shape, self.order)
        if have == want:
            return tensor
        with torch.no_grad():
            if _same(tensor.shape, have, want):
                return tensor.as_strided(tensor.shape, want)
            copy = torch.empty_strided(tensor.shape, want, dtype=tensor.dtype, device=tensor.device)
            return copy.copy_(tensor)


def _same(shape: Sequence[int], have: Sequence[int], want: Sequence[int]) -> bool:
    """Whether two strides address the same elements: they may differ for axes of size one."""
    # A tensor without elements has no addresses.
    return 0 in shape or all(
        size == 1 or a == b for size, a, b in zip(shape, have, want, strict=True)
    )
