"""GLU splits: the two halves of a value's last axis, which an op multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from qfuse.ir.movement.registry import movement_of
from qfuse.ir.movement.slice import Slice
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.epilogue import GluOrder
from qfuse.ir.ops.views import shape_of


@dataclass(frozen=True, slots=True)
class GluSplit:
    """A value that is split in the middle of its last axis.

    Attributes:
        source: The value.
        order: Which half comes first in memory.
        cuts: The nodes that split it: the halves, and the split op that they are results of.
    """

    source: Node
    order: GluOrder
    cuts: frozenset[Node]


def glu_split_of(gate: Node, up: Node) -> GluSplit | None:
    """View two nodes as the first and the second half of one value, in any order, or ``None``."""
    cut = movement_of(gate)
    if not isinstance(cut, Slice):
        return None
    source = cut.source
    size = shape_of(source)[-1]
    if not isinstance(size, int) or size % 2:
        return None
    low, high = (0, size // 2), (size // 2, size)
    orders = {(low, high): GluOrder.GATE_FIRST, (high, low): GluOrder.UP_FIRST}
    bounds = _bounds(gate, source), _bounds(up, source)
    if bounds[0] is None or bounds[1] is None or bounds not in orders:
        return None
    nodes = {gate, up, *gate.all_input_nodes, *up.all_input_nodes} - {source}
    return GluSplit(source, orders[bounds[0], bounds[1]], frozenset(nodes))


def uncast(node: Node) -> tuple[list[Node], Node]:
    """Return the chain of casts that ends in ``node``, in order, and its input."""
    found: list[Node] = []
    while (source := cast_source(node)) is not None:
        found.insert(0, node)
        node = source
    return found, node


def _bounds(node: Node, source: Node) -> tuple[int, int] | None:
    """Return start and end of the slice of ``source``'s last axis that ``node`` is."""
    cut = movement_of(node)
    if not isinstance(cut, Slice) or cut.source is not source or cut.step != 1:
        return None
    # The end of a slice may exceed the size.
    size = shape_of(node)[-1]
    if cut.axis != len(shape_of(source)) - 1 or cut.start is None or not isinstance(size, int):
        return None
    return cut.start, cut.start + size
