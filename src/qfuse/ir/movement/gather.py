"""Movements that gather elements by computed indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import is_call
from qfuse.ir.movement.base import Moved, Movement, Mover, keep, unsqueeze, with_axis
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_size


@dataclass(frozen=True, slots=True)
class Index(Movement):
    """``index_select``, ``embedding``, and indexing with one tensor of integers.

    Attributes:
        axis: The indexed axis of the source. The axes of the indices replace it in the result.
        index: Node of the indices.
    """

    axis: int
    index: Node

    @property
    def _rank(self) -> int:
        """Number of axes of the indices; always one for index_select."""
        return len(self.after) - len(self.before) + 1

    def forward(self, block: Block) -> Moved | Refusal:
        """Index the grid if every index has its own entry, or all share one."""
        b = block[self.axis]
        before, after = block[: self.axis], block[self.axis + 1 :]
        if covers(b, self.before[self.axis]):
            return Moved((*before, *(None,) * self._rank, *after), self._spread)
        # Indices take single elements in any order, so blocks do not stay together.
        if b != 1:
            return Refusal(f"indices are taken out of blocks of {b}")
        return Moved((*before, *(1,) * self._rank, *after), self.apply)

    def _spread(self, mover: Mover, value: Any) -> Any:
        """Replace the axis with one entry by as many axes as the indices have."""
        if self._rank == 0:
            return mover.call(aten.squeeze.dims, value, [self.axis])
        return unsqueeze(mover, value, [self.axis] * (self._rank - 1))

    def backward(self, block: Block) -> Moved | Refusal:
        """Accept parameters that do not depend on the axis."""
        axes = list(range(self.axis, self.axis + self._rank))
        if not all(covers(block[axis], self.after[axis]) for axis in axes):
            return Refusal("an index may be taken twice, with two scales")
        left = (*block[: self.axis], None, *block[self.axis + self._rank :])

        def apply(mover: Mover, value: Any) -> Any:
            if not axes:
                return unsqueeze(mover, value, (self.axis,))
            # One of the axes of the indices, each with one entry, remains as the indexed axis.
            return mover.call(aten.squeeze.dims, value, axes[1:]) if axes[1:] else value

        return Moved(left, apply)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Index another value."""
        if is_call(self.node, aten.index.Tensor):
            return mover.call(aten.index.Tensor, value, [*[None] * self.axis, self.index])
        if is_call(self.node, aten.embedding.default):
            return mover.call(aten.embedding.default, value, self.index)
        return mover.call(aten.index_select.default, value, self.axis, self.index)


@dataclass(frozen=True, slots=True)
class Gather(Movement):
    """``gather``: along one axis, every element of the result has its own index.

    The other axes may be shorter in the result, which contains their leading elements.

    Attributes:
        axis: The axis.
        index: Node of the indices.
    """

    axis: int
    index: Node

    def forward(self, block: Block) -> Moved | Refusal:
        """Accept parameters that do not depend on the axis, or one value per element."""
        if not covers(block[self.axis], self.before[self.axis]):
            return self._one_each(block)
        kept: list[int | None] = []
        cuts: list[tuple[int, int]] = []
        for axis, (b, old, new) in enumerate(zip(block, self.before, self.after, strict=True)):
            if axis == self.axis or covers(b, old):
                kept.append(None)
                continue
            assert b is not None, "no block is the whole axis"
            if not same_size(old, new):
                if not isinstance(new, int):
                    return Refusal(f"the size of axis {axis} is not known")
                # The leading elements lie in the leading blocks, the last of which may become
                # partial.
                cuts.append((axis, -(-new // b)))
            kept.append(b)

        def apply(mover: Mover, value: Any) -> Any:
            for axis, end in cuts:
                value = mover.call(aten.slice.Tensor, value, axis, 0, end, 1)
            return value

        return Moved(tuple(kept), apply)

    def _one_each(self, block: Block) -> Moved | Refusal:
        # With a scale per element, the scales are gathered by the same indices.
        if all(b == 1 or same_size(n, 1) for b, n in zip(block, self.before, strict=True)):
            return Moved((1,) * len(block), self.apply)
        return Refusal("elements are gathered along an axis of several blocks")

    def backward(self, block: Block) -> Moved | Refusal:
        """Accept parameters that do not depend on the axis, nor on a shortened one."""
        for axis, (b, old, new) in enumerate(zip(block, self.before, self.after, strict=True)):
            if (axis == self.axis or not same_size(old, new)) and not covers(b, new):
                return Refusal("elements that are not gathered have no scale")
        # The one entry of a shortened axis then applies to the whole longer one.
        cut = [not same_size(a, b) for a, b in zip(self.before, self.after, strict=True)]
        left = tuple(None if c else b for b, c in zip(block, cut, strict=True))
        return Moved(with_axis(left, self.axis, None), keep)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Gather another value."""
        return mover.call(aten.gather.default, value, self.axis, self.index)
