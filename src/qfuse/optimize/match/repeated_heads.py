"""Operands of a product whose heads are copies, as those of grouped queries are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.aten import aten
from qfuse.ir.movement.base import Movement
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.movement.reshape import Copy, Expand, Permute, Squeeze, Unsqueeze, View
from qfuse.ir.movement.window import RepeatInterleave
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.block import covers
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import Size, same_shape, same_size
from qfuse.rewrite.rewriter import Rewriter

HEADS = -3
"""The batch axis whose entries are copies."""

# Bounds the search for the op that repeats.
_STEPS = 8


@dataclass(frozen=True, slots=True)
class RepeatedHeads:
    """An operand ``[*batch, groups * count, ...]`` that repeats each head ``count`` times in a row.

    Attributes:
        value: The operand before its last two axes are swapped, if they are.
        turned: Whether they are.
        count: The copies of a head.
        source: The heads before they are repeated, with any axes of size 1.
        order: The axes of the repeated heads in the order of ``value``, as where ``[batch, rows,
            heads, width]`` is repeated and then transposed.
    """

    value: Node
    turned: bool
    count: int
    source: Node
    order: tuple[int, ...]

    @property
    def heads(self) -> int:
        """The number of heads with all copies."""
        return int(shape_of(self.value)[HEADS])

    @property
    def is_one_head(self) -> bool:
        """Whether all heads are copies of one, so that broadcasting needs no other axis."""
        return self.heads == self.count

    def block_of_heads(self, size: int | None) -> int | Refusal | None:
        """Return how many heads share a scale where each is there once, ``None`` if all do."""
        if covers(size, self.heads):
            return None
        if size is None or size % self.count:
            return Refusal("copies of one head have different scales")
        return size // self.count

    def without_copies(self, parts: Sequence[int], rw: Rewriter) -> Node:
        """Return the heads, each once, along axes of the sizes ``parts``; not turned."""
        at, more = self.order[HEADS], len(parts) - 1
        shape = _reordered(shape_of(self.value), self.order)
        wanted = [*shape[:at], *parts, *shape[at + 1 :]]
        found = self._viewed(wanted)
        if found is None:
            sizes = [self._size(size, axis, rw) for axis, size in enumerate(shape)]
            sizes[at : at + 1] = parts
            found = rw.call(aten.reshape.default, self.source, sizes)
        order = [axis + more if axis > at else axis for axis in self.order]
        heads = len(order) + HEADS
        order[heads : heads + 1] = range(at, at + more + 1)
        if order == sorted(order):
            return found
        return rw.call(aten.permute.default, found, order)

    def _viewed(self, wanted: Sequence[Size]) -> Node | None:
        """Return the heads before they are repeated, in a shape that they had, if they had it."""
        found = self.source
        for _ in range(_STEPS):
            if same_shape(shape_of(found), wanted):
                return found
            if not isinstance(movement_of(found), (View, Unsqueeze, Squeeze)):
                break
            found = _source(found)
        return None

    def _size(self, size: Size, axis: int, rw: Rewriter) -> Argument:
        """Return a size as an argument, from before the heads are repeated."""
        if isinstance(size, int):
            return size
        ask = aten.sym_size.int
        for known, other in enumerate(shape_of(self.source)):
            if same_size(size, other):
                return rw.call(ask, self.source, known)
        return rw.call(ask, self.value, self.order.index(axis))


def repeated_heads(operand: Node) -> RepeatedHeads | None:
    """View ``operand`` as heads that are repeated, or ``None``."""
    rank = len(shape_of(operand))
    if rank < -HEADS:
        return None
    turned = _is_turned(movement_of(operand))
    value = _source(operand) if turned else operand
    moved, order = movement_of(value), tuple(range(rank))
    found = value
    if isinstance(moved, Permute):
        found, order = moved.source, tuple(moved.dims)
    for _ in range(_STEPS):
        if not isinstance(movement_of(found), (View, Copy, Unsqueeze, Squeeze)):
            break
        found = _source(found)
    shape = _reordered(shape_of(value), order)
    count = _count(movement_of(found), shape, order[HEADS])
    if count is None:
        return None
    return RepeatedHeads(value, turned, count, _source(found), order)


def _reordered(shape: Sequence[Size], order: Sequence[int]) -> list[Size]:
    """Return the shape of a value before its axes were put into ``order``."""
    return [shape[order.index(axis)] for axis in range(len(shape))]


def _is_turned(movement: Movement | None) -> bool:
    """Whether a movement swaps the last two axes."""
    if not isinstance(movement, Permute):
        return False
    *batch, row, column = range(len(movement.dims))
    return movement.dims == (*batch, column, row)


def _source(node: Node) -> Node:
    movement = movement_of(node)
    assert movement is not None, "it was a movement"
    return movement.source


def _count(movement: Movement | None, shape: Sequence[Size], at: int) -> int | None:
    """Return how often a movement repeats each entry of ``shape`` along the axis ``at``.

    The result of the movement is viewed in that shape.
    """
    where = _axis(movement)
    if movement is None or where is None:
        return None
    axis, count = where
    # What follows the repeated axis is one entry.
    if not same_shape(movement.after[axis + 1 :], shape[at + 1 :]):
        return None
    heads = shape[at]
    return count if isinstance(heads, int) and count > 1 and heads % count == 0 else None


def _axis(movement: Movement | None) -> tuple[int, int] | None:
    """Return the one axis along which a movement repeats elements in a row, and how often."""
    if isinstance(movement, RepeatInterleave):
        return movement.axis, movement.count
    if not isinstance(movement, Expand) or len(movement.before) != len(movement.after):
        return None
    sizes = enumerate(zip(movement.before, movement.after, strict=True))
    grown = [(axis, new) for axis, (old, new) in sizes if not same_size(old, new)]
    if len(grown) != 1:
        return None
    ((axis, size),) = grown
    return (axis, size) if isinstance(size, int) else None
