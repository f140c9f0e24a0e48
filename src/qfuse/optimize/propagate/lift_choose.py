"""Lift the choice of parameters above movements that keep every block together."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch.fx.node import Argument

from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.movement.base import Moved, Movement
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.movement.reshape import Expand
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Choose, as_choose
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.block import block_text, same_grid
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import is_positive, same_strides
from qfuse.optimize.match.move_qparams import (
    FakeMover,
    ParamMover,
    PropagatedUp,
    movement_name,
    outer_steps,
    propagate_up,
    reads_any_strides,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class LiftChooseSite:
    """A choice of parameters, the movements that it crosses, and how its results move down."""

    choose: Choose
    propagate_up: PropagatedUp
    down: tuple[Moved, ...]


class LiftChoose(Rule[LiftChooseSite]):
    """``choose_qparams(m(x))`` becomes the parameters chosen for ``x``, moved like ``x``.

    Before::

        x -> view -> choose_qparams -> scale, zero point

    After::

        x -> choose_qparams -> view -> scale, zero point

    The minimum and maximum of a block do not depend on the order of its elements, so blocks have
    to map one to one onto blocks: by a bijection, or by copies of the same elements.

    Refuses: slices, indexing, repeats, concatenations and paddings, whose blocks hold other
    elements; blocks that are not blocks above the movement; results that leave the graph; users of
    a result that may depend on its strides where they change.
    """

    name = "lift-choose"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.choose_qparams,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> LiftChooseSite | Miss:
        """Match a choice of parameters of a movement that keeps its blocks together."""
        choose = as_choose(node)
        assert choose is not None, "the anchor is a choice of parameters"
        first = movement_of(choose.x)
        if first is None:
            return Miss(MissCode.PATTERN, node, "its operand is not a movement", progress=0)
        rank = len(choose.spec.block)
        # The second level of scales covers the whole tensor, so it moves through any bijection.
        outer = (None,) * rank if choose.spec.outer else None
        found = propagate_up(choose.x, choose.spec.block, _keeps_blocks, outer)
        if not found.steps:
            return _refuse_movement(choose, first, found)
        down = _down(choose, found)
        if isinstance(down, Miss):
            return down
        return _refuse_users(choose, found, down) or LiftChooseSite(choose, found, down)

    def rewrite(self, site: LiftChooseSite, rw: Rewriter) -> None:
        """Choose for the source, and move the results."""
        spec = replace(site.choose.spec, block=site.propagate_up.block)
        mover = ParamMover(rw)
        args: list[Argument] = [site.propagate_up.source, str(spec)]
        if site.choose.outer_scale is not None:
            seconds = outer_steps(site.propagate_up.moved)
            args.append(mover.params(site.choose.outer_scale, seconds))
        pair = rw.call(ops.choose_qparams, *args)
        for index in (0, 1):
            users = _results(site.choose.node, index)
            if users:
                moved = mover.params(rw.item(pair, index), site.down)
                for user in users:
                    rw.replace(user, moved)


def _keeps_blocks(movement: Movement) -> bool:
    if isinstance(movement, Expand):
        # Zero copies hold no element, so nothing would be chosen whatever the source holds.
        return all(map(is_positive, movement.after))
    return movement.bijective


def _down(choose: Choose, found: PropagatedUp) -> tuple[Moved, ...] | Miss:
    """Move the block down again; the result must be the original block."""
    # A block may move up to one that comes down differently, such as a merged axis.
    block = found.block
    down: list[Moved] = []
    for step in reversed(found.steps):
        moved = step.movement.forward(block)
        if isinstance(moved, Refusal):
            text = "parameters chosen above {} do not move down: {}"
            at = step.movement.node
            details = movement_name(step.movement), moved.reason
            return Miss(MissCode.GRANULARITY, at, text, *details, progress=2)
        down.append(moved)
        block = moved.block
    if not same_grid(block, choose.spec.block, shape_of(choose.x)):
        text = "blocks of {} move down as blocks of {}"
        names = block_text(choose.spec.block), block_text(block)
        return Miss(MissCode.GRANULARITY, choose.x, text, *names, progress=2)
    return tuple(down)


def _refuse_movement(choose: Choose, first: Movement, found: PropagatedUp) -> Miss:
    name = movement_name(first)
    if found.blocked is None:
        text = "{} has other elements in a block than its source"
        return Miss(MissCode.GRANULARITY, first.node, text, name, progress=2)
    text = "parameters in blocks of {} are not chosen above {}: {}"
    details = block_text(choose.spec.block), name, found.blocked[1].reason
    return Miss(MissCode.GRANULARITY, first.node, text, *details, progress=2)


def _refuse_users(choose: Choose, found: PropagatedUp, down: Sequence[Moved]) -> Miss | None:
    """Refuse results that leave the graph, and users that may depend on strides."""
    # Move the parameters as fake tensors first, since only their strides are needed.
    source = found.source.meta["val"]
    chosen = source.new_empty(replace(choose.spec, block=found.block).grid(source.shape))
    for step in down:
        chosen = step.apply(FakeMover(), chosen)
    for result in choose.node.users:
        # They would become views of the parameters above.
        if leaves_graph(result):
            text = "the parameters leave the graph as tensors of their own"
            return Miss(MissCode.SHARED, result, text, progress=3)
        if not same_strides(chosen, result.meta["val"]) and not reads_any_strides(result):
            text = "the strides of the parameters would change, and a user may depend on them"
            return Miss(MissCode.SHAPE, result, text, progress=3)
    return None


def _results(node: Node, index: int) -> list[Node]:
    return [u for u in node.users if u.target is operator.getitem and u.args[1] == index]
