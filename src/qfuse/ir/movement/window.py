"""Sliding windows, diagonals, interleaved repeats, and padding with copies of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, overload_of
from qfuse.ir.movement.base import Moved, Movement, Mover, keep, squeezed, unsqueeze, with_axis
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import exact_quotient


@dataclass(frozen=True, slots=True)
class Unfold(Movement):
    """``unfold``: windows along an axis, which may overlap; their elements become the last axis.

    Attributes:
        axis: The unfolded axis of the source; in the result, it indexes windows.
        size: Elements per window.
        step: Distance between windows.
    """

    axis: int
    size: int
    step: int

    def forward(self, block: Block) -> Moved | Refusal:
        """Unfold the grid if windows consist of whole blocks, or lie within one."""
        b, axis = block[self.axis], self.axis
        if covers(b, self.before[axis]):
            last = len(block)
            left = (*with_axis(block, axis, None), None)
            return Moved(left, lambda mover, value: unsqueeze(mover, value, (last,)))
        assert b is not None, "no block is the whole axis"
        if self.size % b == 0 and self.step % b == 0:
            return self._across(block, b)
        count = self.after[axis]
        # Windows begin at multiples of the step, so none that is as short as the step leaves its
        # block.
        if b % self.step == 0 and self.size <= self.step and isinstance(count, int):
            return self._inside(block, b // self.step, count)
        return Refusal(f"windows of {self.size}, {self.step} apart, cut blocks of {b}")

    def _across(self, block: Block, b: int) -> Moved | Refusal:
        """Every window consists of whole blocks."""
        count, each, apart = self.after[self.axis], self.size // b, self.step // b
        partial = exact_quotient(self.before[self.axis], b) is None
        if partial and not isinstance(count, int):
            return Refusal("the number of windows is not known")

        def apply(mover: Mover, value: Any) -> Any:
            shown = mover.call(aten.unfold.default, value, self.axis, each, apart)
            if not partial:
                return shown
            # The grid has one more window, which would end in the partial last block.
            return mover.call(aten.slice.Tensor, shown, self.axis, 0, count, 1)

        return Moved((*with_axis(block, self.axis, 1), b), apply)

    def _inside(self, block: Block, windows: int, count: int) -> Moved:
        """Every window lies within a block, which ``windows`` windows share."""
        # Elements behind the last window may have blocks of their own, which no window has.
        used = -(-count // windows)

        def apply(mover: Mover, value: Any) -> Any:
            cut = mover.call(aten.slice.Tensor, value, self.axis, 0, used, 1)
            return unsqueeze(mover, cut, (len(block),))

        return Moved((*with_axis(block, self.axis, windows), None), apply)

    def backward(self, block: Block) -> Moved | Refusal:
        """Accept parameters that depend neither on the window nor on the position in it."""
        *left, last = block
        if not covers(last, self.size) or not covers(left[self.axis], self.after[self.axis]):
            return Refusal("an element may be in two windows, or in none")
        whole = with_axis(tuple(left), self.axis, None)
        return Moved(whole, squeezed(block, (len(left),)).apply)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Unfold."""
        return mover.call(aten.unfold.default, value, self.axis, self.size, self.step)


@dataclass(frozen=True, slots=True)
class Diagonal(Movement):
    """``diagonal``: replaces two axes by their diagonal, as the last axis.

    Attributes:
        offset: Offset above the main diagonal.
        first: The axis of rows.
        second: The axis of columns.
    """

    offset: int
    first: int
    second: int

    def forward(self, block: Block) -> Moved | Refusal:
        """Take the diagonal of the grid, or the entries of the axis along which it varies."""
        pair = (self.first, self.second)
        whole = [covers(block[axis], self.before[axis]) for axis in pair]
        left = tuple(b for axis, b in enumerate(block) if axis not in pair)
        count = self.after[-1]
        # The grid is 1 x 1 along the two axes, whose diagonal is the main one for any offset.
        if all(whole):
            return Moved((*left, None), lambda mover, value: self._diagonal(mover, value, 0))
        if any(block[axis] != 1 for axis, one in zip(pair, whole, strict=True) if not one):
            return Refusal("the diagonal crosses blocks unevenly")
        if not any(whole):
            return Moved((*left, 1), self.apply)
        if not isinstance(count, int):
            return Refusal("the length of the diagonal is not known")
        vary = pair[1] if whole[0] else pair[0]
        # Above the main diagonal the first element is in column `offset`, below it in row
        # `-offset`.
        start = max(self.offset, 0) if vary == self.second else max(-self.offset, 0)

        def along(mover: Mover, value: Any) -> Any:
            cut = mover.call(aten.slice.Tensor, value, vary, start, start + count, 1)
            single = pair[0] if vary == pair[1] else pair[1]
            turned = [axis for axis in range(len(block)) if axis not in pair]
            turned += [vary, single]
            moved = mover.call(aten.permute.default, cut, turned)
            return mover.call(aten.squeeze.dims, moved, [len(block) - 1])

        return Moved((*left, 1), along)

    def backward(self, block: Block) -> Moved | Refusal:
        """Accept parameters that do not depend on the diagonal."""
        if not covers(block[-1], self.after[-1]):
            return Refusal("the elements beside the diagonal have no scale")
        grown: list[int | None] = list(block[:-1])
        pair = sorted((self.first, self.second))
        for axis in pair:
            grown.insert(axis, None)
        low, high = pair

        def apply(mover: Mover, value: Any) -> Any:
            # The diagonal's axis has one entry and becomes the first of the two axes.
            one = mover.call(aten.squeeze.dims, value, [len(block) - 1])
            return unsqueeze(mover, one, (low, high))

        return Moved(tuple(grown), apply)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Take the diagonal."""
        return self._diagonal(mover, value, self.offset)

    def _diagonal(self, mover: Mover, value: Any, offset: int) -> Any:
        return mover.call(aten.diagonal.default, value, offset, self.first, self.second)


@dataclass(frozen=True, slots=True)
class RepeatInterleave(Movement):
    """``repeat_interleave``: repeats every element of an axis consecutively.

    Attributes:
        axis: The axis.
        count: Number of repetitions.
    """

    axis: int
    count: int

    def forward(self, block: Block) -> Moved:
        """Enlarge every block to contain the copies."""
        b = block[self.axis]
        if covers(b, self.before[self.axis]):
            return Moved(with_axis(block, self.axis, None), keep)
        assert b is not None, "no block is the whole axis"
        return Moved(with_axis(block, self.axis, b * self.count), keep)

    def backward(self, block: Block) -> Moved | Refusal:
        """Accept blocks that contain all copies of their elements."""
        b = block[self.axis]
        if covers(b, self.after[self.axis]):
            return Moved(with_axis(block, self.axis, None), keep)
        assert b is not None, "no block is the whole axis"
        if b % self.count:
            return Refusal("copies of one element have different scales")
        return Moved(with_axis(block, self.axis, b // self.count), keep)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Repeat."""
        return mover.call(aten.repeat_interleave.self_int, value, self.count, self.axis)


@dataclass(frozen=True, slots=True)
class EdgePad(Movement):
    """A padding with copies of elements: reflect, replicate or circular.

    Attributes:
        axes: The axes that are padded.
    """

    axes: tuple[int, ...]

    def forward(self, block: Block) -> Moved | Refusal:
        """Use one block for padded axes."""
        return self._padded(block, self.before)

    def backward(self, block: Block) -> Moved | Refusal:
        """Accept parameters that do not depend on the padded axes."""
        return self._padded(block, self.after)

    def _padded(self, block: Block, sizes: Sequence[Any]) -> Moved | Refusal:
        for axis in self.axes:
            if not covers(block[axis], sizes[axis]):
                return Refusal(f"axis {axis} is padded with elements of several blocks")
        left = tuple(None if axis in self.axes else b for axis, b in enumerate(block))
        return Moved(left, keep)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Pad."""
        rest = [v for name, v in arguments(self.node).items() if name != "self"]
        return mover.call(overload_of(self.node), value, *rest)
