"""Splits: every part is a movement of the whole tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.ops.qdq import Dequantize
from qfuse.ir.ops.views import node_of
from qfuse.optimize.commute.base import Commutes, Crossing, End, moved
from qfuse.optimize.commute.movement import moved_down
from qfuse.optimize.match.move_qparams import QuantizedMover
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, arguments


@dataclass(frozen=True, slots=True)
class Split(Commutes):
    """An op whose results are parts of its operand.

    ``split(dequantize(q, s))[i]`` is ``dequantize(split(q)[i], s_i)``, for every part with users.
    Refuses: a dequantize with other users; a block that spans two parts; a part that leaves the
    graph, whose strides would change. A quantize rises above a part: see ``MovementOp``.

    Attributes:
        node: The op.
        source: Its operand.
    """

    ops: ClassVar[tuple[OpOverload, ...]] = SPLITS

    node: Node
    source: Node

    @classmethod
    def of(cls, node: Node) -> Split | Miss | None:
        """View a split; miss one without users."""
        if not is_call(node, *SPLITS):
            return None
        if not node.users:
            return Miss(MissCode.PATTERN, node, "it has no users", progress=0)
        return cls(node, node_of(arguments(node)["self"]))

    def sink(self, operands: tuple[Dequantize, ...]) -> Crossing | Miss:
        """Move the parameters to every part."""
        (dequantize,) = operands
        ends: list[End] = []
        # All parts or none: for a part that stays, the whole tensor would still be dequantized.
        for part in self.node.users:
            movement = movement_of(part)
            if movement is None:
                return Miss(MissCode.SHAPE, self.node, "a part of unknown size", progress=2)
            step = moved_down(movement, dequantize)
            if isinstance(step, Miss):
                return step
            ends.append(moved(part, dequantize.params, [step]))
        # Without a price: the parts are views, and no element is dequantized twice.
        return Crossing(tuple(ends), self._apply, parts=True)

    def _apply(self, mover: QuantizedMover, values: Sequence[Any]) -> Iterable[Any]:
        rest = [value for name, value in arguments(self.node).items() if name != "self"]
        pieces = mover.call(overload_of(self.node), values[0], *rest)
        for part in self.node.users:
            yield mover.item(pieces, int(str(part.args[1])))
