"""Lift requantize above movements, where equal requantizes of one value become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.movement.base import Moved, Movement
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Requantize, as_requantize
from qfuse.ir.ops.views import tensor_of
from qfuse.optimize.match.move_qparams import (
    FakeMover,
    GraphMover,
    PropagatedUp,
    is_free,
    moved_params,
    movement_name,
    moves_stored,
    propagate_up,
)
from qfuse.optimize.match.strides import refuse_layout
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class LiftRequantizeSite:
    """A requantize, the movements it crosses, and how its input parameters cross them."""

    requantize: Requantize
    propagate_up: PropagatedUp
    read: tuple[Moved, ...]


class LiftRequantize(Rule[LiftRequantizeSite]):
    """``requantize(m(q), a, b)`` becomes ``m(requantize(q, a', b'))``.

    Before::

        q -> view -> requantize(a, b) -> ...

    After::

        q -> requantize(a viewed back, b viewed back) -> view -> ...

    Refuses: input or output parameters that are not constant on blocks above the movement; a
    movement that selects only some elements, or a copy with other users; quantized values that
    leave the graph; strides that would change where a user may depend on them.
    """

    name = "lift-requantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.requantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> LiftRequantizeSite | Miss:
        """Match a requantize of a movement that both its parameters can cross."""
        requantize = as_requantize(node)
        assert requantize is not None, "the anchor is a requantize"
        first = movement_of(requantize.q)
        if first is None:
            return Miss(MissCode.PATTERN, node, "its operand is not a movement", progress=0)
        dtypes = requantize.params.spec.dtype, requantize.out_params.spec.dtype

        def crosses(movement: Movement) -> bool:
            # Requantizing is no cheaper above: it moves up
            # to meet equal ones, and must not cost more.
            return is_free(movement) and all(moves_stored(movement, d) for d in dtypes)

        if not crosses(first):
            text = "requantizing before {} would requantize more elements, or copy twice"
            return Miss(MissCode.ORDER, first.node, text, movement_name(first), progress=2)
        read, out = (
            propagate_up(requantize.q, params.spec.block, crosses, params.spec.outer)
            for params in (requantize.params, requantize.out_params)
        )
        count = len(out.steps)
        # Both sides have to stop at one place: a requantize has one operand.
        if not count or len(read.steps) < count:
            blocked = read.blocked if count else out.blocked
            assert blocked is not None, "the first movement was not crossed"
            text, details = "its parameters do not move above {}: {}", movement_name(blocked[0])
            why = blocked[1].reason
            return Miss(MissCode.GRANULARITY, blocked[0].node, text, details, why, progress=2)
        with torch.no_grad():
            q = torch.empty_like(tensor_of(out.source), dtype=dtypes[1])
        wrong = refuse_layout(node, out.apply(FakeMover(), q))
        return wrong or LiftRequantizeSite(requantize, out, read.moved[:count])

    def rewrite(self, site: LiftRequantizeSite, rw: Rewriter) -> None:
        """Requantize the source and move the result."""
        old = site.requantize
        made = Requantize(
            old.node,
            site.propagate_up.source,
            moved_params(rw, old.params, site.read),
            moved_params(rw, old.out_params, site.propagate_up.moved),
        )
        q = rw.call(ops.requantize, *made.call_args())
        rw.replace(old.node, site.propagate_up.apply(GraphMover(rw), q))
