"""Move first, then dequantize: the stored numbers are smaller, and the op that reads meets them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch

from qfuse.cost.model import CostModel
from qfuse.cost.work import WorkRange
from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.movement.base import Movement, move_levels
from qfuse.ir.movement.collective import Collective, is_waited_for
from qfuse.ir.movement.registry import MOVEMENT_OPS, SPLITS, movement_of
from qfuse.ir.movement.slice import Select, Slice
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import shape_of, tensor_of
from qfuse.ir.quant.block import MoveFailure
from qfuse.ir.quant.spec import dtype_name
from qfuse.optimize.match.memory_cost import passed, saved
from qfuse.optimize.match.move_qparams import (
    FakeMover,
    GraphMover,
    Step,
    copies,
    moved_params,
    movement_name,
    moves_stored,
    refuse_uncovered,
    same_strides,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule

# One that is read by more than this is not worth the search.
_READERS = 64


@dataclass(frozen=True, slots=True)
class SinkDequantizeSite:
    """A dequantize, and the movement of its result."""

    dequantize: Dequantize
    step: Step


class SinkDequantize(Rule[SinkDequantizeSite]):
    """``m(dequantize(q, s))`` becomes ``dequantize(m(q), s')`` for every movement ``m``.

    Before::

        q -> dequantize(s) -> view -> ...

    After::

        q -> view -> dequantize(s viewed) -> ...

    Refuses: parameters that are not constant on blocks below the movement; a dequantize that
    something else reads, since it would be done twice, unless all readers of the moved one would
    read stored numbers; strides that would change where the caller or a view sees them;
    collectives, see ``sink-below-collective``. Does not pay where copies of one element would each
    be dequantized.
    """

    name = "sink-dequantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (*MOVEMENT_OPS, torch.ops.aten.as_strided.default)
    exactness = Exactness.EXACT
    crosses_ranks: ClassVar[bool] = False

    def match(self, node: Node) -> SinkDequantizeSite | Miss:
        """Match a movement of a dequantize whose parameters follow it."""
        movement = movement_of(node)
        if movement is None and as_dequantize(node.all_input_nodes[0]) is not None:
            wrong = refuse_uncovered(node)
            assert wrong is not None, "the anchor is an op that moves elements"
            return wrong
        dequantize = None if movement is None else as_dequantize(movement.source)
        if movement is None or dequantize is None:
            return Miss(MissCode.PATTERN, node, "it does not move a dequantize", progress=0)
        if isinstance(movement, Collective) and not self.crosses_ranks:
            text = "below {} the scales would be sent too, and all ranks would have to do the same"
            return Miss(MissCode.ORDER, node, text, op_name(movement.start), progress=2)
        step = sink_step(dequantize, movement)
        if isinstance(step, Miss):
            return step
        with torch.no_grad():
            moved = movement.apply(FakeMover(), tensor_of(dequantize.q))
        parts = isinstance(movement, (Slice, Select))
        return refuse_sunk(node, moved, parts=parts) or SinkDequantizeSite(dequantize, step)

    def gain(self, site: SinkDequantizeSite, cost: CostModel) -> float | None:
        """Compare what is dequantized, and what is copied, before and after."""
        movement, spec = site.step.movement, site.dequantize.params.spec
        own = passed(movement.node, spec.dtype, spec.real)
        after = [] if vanishes(movement.node) else [own]
        before: list[WorkRange] = []
        if len(site.dequantize.node.users) == 1:
            before.append(passed(movement.source, spec.dtype, spec.real))
        elif isinstance(movement, (Slice, Select)):
            # The other parts will follow, each with its share.
            before.append(own)
        if copies(movement):
            before.append(passed(movement.node, spec.real, spec.real))
            after.append(passed(movement.node, spec.dtype, spec.dtype))
        return saved(cost, before, after)

    def rewrite(self, site: SinkDequantizeSite, rw: Rewriter) -> None:
        """Move the stored numbers, and dequantize that."""
        movement = site.step.movement
        mover = GraphMover(rw)
        q = mover.node(movement.apply(mover, mover.open(site.dequantize.q)), "moved")
        params = moved_params(rw, site.dequantize.params, [site.step.moved])
        sunk = rw.call(ops.dequantize, *params.call_args(q))
        rw.replace(movement.node, sunk)


def sink_step(dequantize: Dequantize, movement: Movement) -> Step | Miss:
    """Move the parameters of a dequantize below a movement of its result."""
    for user in islice(dequantize.node.users, _READERS):
        moves = movement_of(user) is not None or is_call(user, *SPLITS) or is_waited_for(user)
        if not moves and not vanishes(movement.node):
            text = "its dequantize is also read by {}"
            return Miss(MissCode.SHARED, dequantize.node, text, op_name(user), progress=2)
    spec = dequantize.params.spec
    if not moves_stored(movement, spec.dtype):
        text = "{} does not move {}"
        told = movement_name(movement), dtype_name(spec.dtype)
        return Miss(MissCode.DTYPE, movement.node, text, *told, progress=2)
    moved = move_levels(movement.forward, spec.block, spec.outer)
    if not isinstance(moved, MoveFailure):
        return Step(movement, moved)
    return Miss(
        MissCode.GRANULARITY,
        movement.node,
        "{} parameters in blocks of {} do not move below {}: {}",
        spec.granularity(shape_of(dequantize.node)),
        spec.block_text(),
        movement_name(movement),
        moved.reason,
        progress=2,
    )


def refuse_users(dequantize: Dequantize, node: Node) -> Miss | None:
    """Refuse a dequantize that something besides ``node`` reads, if ``node`` stays one too."""
    for user in islice(dequantize.node.users, _READERS):
        if user is not node and not vanishes(node):
            text = "its dequantize is also read by {}"
            return Miss(MissCode.SHARED, dequantize.node, text, op_name(user), progress=2)
    return None


def refuse_sunk(node: Node, moved: torch.Tensor, *, parts: bool = False) -> Miss | None:
    """Refuse to give the readers of ``node`` the dequantized form of ``moved`` instead.

    Args:
        node: The real tensor.
        moved: The stored numbers, of the shape of ``node``.
        parts: ``node`` shows a part of a tensor in the order of its axes. The new value has that
            order too, without gaps, so whatever can be viewed there can be viewed here.
    """
    with torch.no_grad():
        same = same_strides(torch.empty_like(moved), tensor_of(node))
    if same or (parts and not leaves_graph(node)):
        return None
    text = "its strides would change, and {} may depend on them"
    return Miss(MissCode.SHAPE, node, text, ", ".join(map(op_name, node.users)), progress=3)


def vanishes(node: Node) -> bool:
    """Whether every reader of a dequantize would read its stored numbers instead."""
    return all(
        is_call(user, ops.quantize)
        or ((linear := as_linear(user)) is not None and as_dequantize(linear.weight) is not None)
        for user in islice(node.users, _READERS)
    )
