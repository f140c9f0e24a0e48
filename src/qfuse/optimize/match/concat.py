"""``cat`` and ``stack``, seen as slices that are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qfuse.ir.graph.schema import is_call
from qfuse.ir.movement.base import Mover
from qfuse.ir.movement.slice import Select, Slice
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.rewrite.prelude import Node, OpOverload, arguments, aten

JOINS: tuple[OpOverload, ...] = (aten.cat.default, aten.stack.default)


@dataclass(frozen=True, slots=True)
class Join:
    """Tensors of one dtype and rank, put together along an axis.

    Attributes:
        node: The op.
        parts: What it joins; a tensor may be there twice.
        axis: Where, in the result.
    """

    node: Node
    parts: tuple[Node, ...]
    axis: int

    @property
    def is_stack(self) -> bool:
        """Whether the axis is new."""
        return is_call(self.node, aten.stack.default)

    def again(self, mover: Mover, values: Sequence[Any]) -> Any:
        """Join other values of the shapes of the parts."""
        op = aten.stack.default if self.is_stack else aten.cat.default
        return mover.call(op, list(values), self.axis)

    def pieces(self) -> tuple[Slice | Select, ...]:
        """Return every part as a movement of the result."""
        if self.is_stack:
            picks = enumerate(self.parts)
            return tuple(Select(part, self.node, self.axis, index) for index, part in picks)
        pieces = []
        start: int | None = 0
        for part in self.parts:
            size = shape_of(part)[self.axis]
            known = start is not None and isinstance(size, int)
            end = start + size if start is not None and isinstance(size, int) else None
            first = start if known else None
            pieces.append(Slice(part, self.node, self.axis, first, end, 1, (first, end)))
            start = end
        return tuple(pieces)


def as_join(value: object) -> Join | None:
    """View ``value`` as a join; ``None`` if it is none, or promotes or skips one of its parts."""
    if not isinstance(value, Node) or not is_call(value, *JOINS):
        return None
    a = arguments(value)
    tensors = a["tensors"]
    assert isinstance(tensors, (list, tuple)), f"not a list of tensors: {value.format_node()}"
    parts = tuple(map(node_of, tensors))
    axis = a["dim"]
    rank = len(shape_of(value))
    stacked = is_call(value, aten.stack.default)
    # A tensor of shape [0] is skipped by cat, whatever the shape of the others is.
    alike = all(
        dtype_of(part) == dtype_of(value) and len(shape_of(part)) + stacked == rank
        for part in parts
    )
    if not alike or not isinstance(axis, int):
        return None
    return Join(value, parts, axis % rank)
