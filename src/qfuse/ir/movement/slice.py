"""Movements that select, repeat or reverse elements along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qfuse.ir.aten import aten
from qfuse.ir.movement.base import (
    Apply,
    Moved,
    Movement,
    Mover,
    keep,
    squeezed,
    unsqueeze,
    with_axis,
)
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import exact_quotient


@dataclass(frozen=True, slots=True)
class Slice(Movement):
    """``slice``, ``narrow``, or one result of ``split`` or ``chunk``.

    Attributes:
        axis: The axis.
        start: First index, non-negative; ``None`` if it is not a number.
        end: Index after the last; ``None`` if it is not a number, or the end of the axis.
        step: Distance between indices.
        bounds: Start and end as in the graph.
    """

    axis: int
    start: int | None
    end: int | None
    step: int
    bounds: tuple[Any, Any]

    def forward(self, block: Block) -> Moved | Refusal:
        """Slice the grid if the slice starts at a block boundary."""
        b, size = block[self.axis], self.before[self.axis]
        if covers(b, size):
            return Moved(with_axis(block, self.axis, None), keep)
        assert b is not None, "no block is the whole axis"
        # The grid has the size of the axis, so even symbolic bounds apply to it as they are.
        if b == 1:
            return Moved(block, self._slice(*self.bounds, self.step))
        if self.start is None or self.end is None or self.step != 1:
            return Refusal(f"a slice with a step, or of unknown bounds, of blocks of {b}")
        first, last = self.start // b, -(-self.end // b)
        cut = self._slice(first, last, 1)
        # Inside one block it does not matter where the slice begins.
        if last - first == 1:
            return Moved(with_axis(block, self.axis, None), cut)
        # Blocks of 4 after a slice from 2 would be 2, 4, 4, ...: no regular grid.
        if self.start % b:
            return Refusal(f"the slice begins at {self.start}, inside a block of {b}")
        return Moved(block, cut)

    def backward(self, block: Block) -> Moved | Refusal:
        """Accept parameters that do not depend on the axis."""
        if not covers(block[self.axis], self.after[self.axis]):
            return Refusal("the elements outside of the slice have no scale")
        return Moved(with_axis(block, self.axis, None), keep)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Slice."""
        return self._slice(*self.bounds, self.step)(mover, value)

    def _slice(self, start: Any, end: Any, step: int) -> Apply:
        return lambda mover, value: mover.call(
            aten.slice.Tensor, value, self.axis, start, end, step
        )


@dataclass(frozen=True, slots=True)
class Select(Movement):
    """``select``: one index of an axis, which is removed.

    Attributes:
        axis: The axis.
        index: The index; non-negative if it is a number and the size of the axis is known.
    """

    axis: int
    index: Any

    def forward(self, block: Block) -> Moved | Refusal:
        """Select from the grid."""
        b, size = block[self.axis], self.before[self.axis]
        index = self.index
        if covers(b, size):
            index = 0
        elif b != 1:
            if not isinstance(index, int) or index < 0:
                return Refusal("the block of a computed index is not known")
            assert b is not None, "no block is the whole axis"
            index //= b
        left = tuple(x for axis, x in enumerate(block) if axis != self.axis)
        return Moved(
            left,
            lambda mover, value: mover.call(aten.select.int, value, self.axis, index),
        )

    def backward(self, block: Block) -> Moved:
        """Use the same parameters for every index."""
        grown: list[int | None] = list(block)
        grown.insert(self.axis, None)
        return Moved(tuple(grown), lambda mover, value: unsqueeze(mover, value, (self.axis,)))

    def apply(self, mover: Mover, value: Any) -> Any:
        """Select."""
        return mover.call(aten.select.int, value, self.axis, self.index)


@dataclass(frozen=True, slots=True)
class Flip(Movement):
    """``flip``.

    Attributes:
        axes: The axes that are reversed.
    """

    axes: tuple[int, ...]

    bijective = True

    def forward(self, block: Block) -> Moved | Refusal:
        """Reverse the grid along the axes of several blocks."""
        turned = []
        for axis in self.axes:
            b, size = block[axis], self.before[axis]
            if covers(b, size):
                continue
            assert b is not None, "no block is the whole axis"
            if exact_quotient(size, b) is None:
                return Refusal(f"the partial last block of axis {axis} would become the first")
            turned.append(axis)
        if not turned:
            return Moved(block, keep)
        return Moved(block, lambda mover, value: mover.call(aten.flip.default, value, turned))

    def backward(self, block: Block) -> Moved | Refusal:
        """Reverse it again."""
        return self.forward(block)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Reverse."""
        return mover.call(aten.flip.default, value, list(self.axes))


@dataclass(frozen=True, slots=True)
class Roll(Movement):
    """``roll`` along named axes.

    Attributes:
        shifts: The shift per axis of ``axes``.
        axes: The axes.
    """

    shifts: tuple[int, ...]
    axes: tuple[int, ...]

    bijective = True

    def forward(self, block: Block) -> Moved | Refusal:
        """Roll the grid by whole blocks."""
        return self._rolled(block, self.shifts)

    def backward(self, block: Block) -> Moved | Refusal:
        """Roll it back."""
        return self._rolled(block, tuple(-s for s in self.shifts))

    def _rolled(self, block: Block, shifts: Sequence[int]) -> Moved | Refusal:
        steps: list[tuple[int, int]] = []
        for axis, shift in zip(self.axes, shifts, strict=True):
            b, size = block[axis], self.before[axis]
            if covers(b, size) or (isinstance(size, int) and size and shift % size == 0):
                continue
            assert b is not None, "no block is the whole axis"
            # A partial last block would be rolled to the front, or be joined with the first.
            if shift % b or exact_quotient(size, b) is None:
                return Refusal(f"rolling by {shift} breaks blocks of {b}")
            steps.append((shift // b, axis))
        if not steps:
            return Moved(block, keep)
        by, where = [s for s, _ in steps], [axis for _, axis in steps]
        return Moved(block, lambda mover, value: mover.call(aten.roll.default, value, by, where))

    def apply(self, mover: Mover, value: Any) -> Any:
        """Roll."""
        return mover.call(aten.roll.default, value, list(self.shifts), list(self.axes))


@dataclass(frozen=True, slots=True)
class Repeat(Movement):
    """``repeat``.

    Attributes:
        counts: Number of repetitions per axis of the result.
    """

    counts: tuple[int, ...]

    def forward(self, block: Block) -> Moved | Refusal:
        """Repeat the grid along the axes of several blocks."""
        fresh = len(self.after) - len(self.before)
        grown: list[int | None] = [None] * fresh
        repeats = [1] * len(self.after)
        for axis, (b, size) in enumerate(zip(block, self.before, strict=True)):
            count = self.counts[fresh + axis]
            # Copies of one block have one scale, so a repeated axis of one block is one block
            # again.
            if count == 1 or covers(b, size):
                grown.append(b if count == 1 else None)
                continue
            assert b is not None, "no block is the whole axis"
            if exact_quotient(size, b) is None:
                return Refusal(f"the partial last block of axis {axis} would be in the middle")
            grown.append(b)
            repeats[fresh + axis] = count

        def apply(mover: Mover, value: Any) -> Any:
            value = unsqueeze(mover, value, range(fresh))
            if all(count == 1 for count in repeats):
                return value
            return mover.call(aten.repeat.default, value, repeats)

        return Moved(tuple(grown), apply)

    def backward(self, block: Block) -> Moved | Refusal:
        """Accept parameters that do not depend on the repeated axes."""
        fresh = len(self.after) - len(self.before)
        for axis, (b, size) in enumerate(zip(block, self.after, strict=True)):
            if (axis < fresh or self.counts[axis] != 1) and not covers(b, size):
                return Refusal("copies of one element have different scales")
        left = tuple(
            b if self.counts[fresh + axis] == 1 else None for axis, b in enumerate(block[fresh:])
        )
        return Moved(left, squeezed(block, tuple(range(fresh))).apply)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Repeat."""
        return mover.call(aten.repeat.default, value, list(self.counts))
