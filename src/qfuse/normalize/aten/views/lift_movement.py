"""Views of weights between their cast and their scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx.node import Argument

from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.movement.base import Movement
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.movement.reshape import Permute, View
from qfuse.ir.movement.slice import Select, Slice
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import is_constant_expression, number_of
from qfuse.ir.ops.view_ops import SIZED_VIEWS, TURNS
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.normalize.match.quantized_values import STORED
from qfuse.rewrite.node_mover import NodeMover
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)

_STEPS = 4
_MOVES = (*TURNS, aten.slice.Tensor, aten.select.int)


@dataclass(frozen=True, slots=True)
class LiftedMovement:
    """A movement of a constant that is cast, and perhaps shifted.

    Attributes:
        movement: The movement.
        q: The constant.
        steps: The casts, and the differences with their zero points, from the last to the first.
    """

    movement: Movement
    q: Node
    steps: tuple[tuple[Node, Argument], ...]


class LiftMovement(Rule[LiftedMovement]):
    """``t(cast(w))`` of a stored weight becomes ``cast(t(w))``.

    Before::

        const w: int8 -> cast -> sub(zero_point) -> t -> mul(scale)

    After::

        const w: int8 -> t -> cast -> sub(zero_point) -> mul(scale)

    The cast and the scale are then one dequantize. The same for slices and permutations, and for
    parts of a weight that is split before it is scaled.

    Exact: each value is cast and shifted as before.

    Refuses: what is computed at run time; a zero point of several elements, or of more axes than
    what is moved; a movement that leaves the graph, whose strides would change.
    """

    name = "lift-movement"
    anchors: ClassVar[tuple[OpOverload, ...]] = (*_MOVES, *SIZED_VIEWS)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> LiftedMovement | Miss:
        """Match a movement of casts of a stored constant."""
        movement = movement_of(node)
        if movement is None or not isinstance(movement, (Permute, Slice, Select, View)):
            text = "it is not a view with fixed bounds"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        q, steps = _below(movement.source)
        if not steps or dtype_of(q) not in STORED or not is_constant_expression(q):
            text = "it moves no stored weight that is cast"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        site = LiftedMovement(movement, q, steps)
        return _refuse(site) or site

    def rewrite(self, site: LiftedMovement, rw: Rewriter) -> None:
        """Move the constant, then cast and shift it."""
        value = site.movement.apply(NodeMover(rw), site.q)
        for step, zero in reversed(site.steps):
            if zero is None:
                value = rw.call(aten._to_copy.default, value, dtype=dtype_of(step))
            else:
                value = rw.call(aten.sub.Tensor, value, zero)
        rw.replace(site.movement.node, value)


def _refuse(site: LiftedMovement) -> Miss | None:
    node = site.movement.node
    is_view = isinstance(site.movement, View)
    # The other rules look through a view by itself.
    if is_view and not any(is_call(user, *_MOVES, *SPLITS) for user in node.users):
        text = "it is a view that nothing moves further"
        return Miss(MissCode.PATTERN, node, text, progress=0)
    if not all(_keeps_type(zero, node) for _, zero in site.steps):
        text = "a zero point of more axes than {}, or one of a number, would change its type"
        return Miss(MissCode.SHAPE, node, text, op_name(node), progress=1)
    if len(node.all_input_nodes) > 1:
        text = "its bounds are computed at run time"
        return Miss(MissCode.NOT_CONSTANT, node, text, progress=1)
    if leaves_graph(node):
        text = "{} leaves the graph, and its strides would change"
        return Miss(MissCode.SHARED, node, text, op_name(node), progress=1)
    return None


def _keeps_type(zero: Argument, moved: Node) -> bool:
    """Whether the difference with a zero point has the same axes and dtype after a movement."""
    # torch promotes a tensor without axes by another rule.
    rank = len(shape_of(moved))
    return not isinstance(zero, Node) or 0 < rank >= len(shape_of(zero))


def _below(node: Node) -> tuple[Node, tuple[tuple[Node, Argument], ...]]:
    """Return the operand of casts and differences, and these."""
    steps: list[tuple[Node, Argument]] = []
    while len(steps) < _STEPS:
        source, zero = cast_source(node), None
        if source is None and is_call(node, aten.sub.Tensor):
            a = arguments(node)
            shifted, zero = a["self"], a["other"]
            one = number_of(zero) is not None and a["alpha"] == 1
            # A zero point of shape [1, 1, 1] would give a matrix another axis.
            if one and isinstance(shifted, Node) and len(shape_of(shifted)) == len(shape_of(node)):
                source = shifted
        if source is None:
            break
        steps.append((node, zero))
        node = source
    return node, tuple(steps)
