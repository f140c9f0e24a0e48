"""Quantize first: the quantized values are smaller, and quantizing meets its producer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost.model import CostModel
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import tensor_of
from qfuse.optimize.commute.base import Crossing, unchanged
from qfuse.optimize.commute.registry import COMMUTING, Families, commuting
from qfuse.optimize.match.memory_cost import saved
from qfuse.optimize.match.move_qparams import FakeMover, GraphMover
from qfuse.optimize.match.strides import refuse_layout
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class LiftQuantizeSite:
    """A quantize, and what becomes of it and of the op that it reads."""

    quantize: Quantize
    crossing: Crossing


class LiftQuantize(Rule[LiftQuantizeSite]):
    """``quantize(op(x), s)`` becomes ``op'(quantize(x, s'))`` for every op that allows it.

    Before::

        x -> op -> quantize(s) -> ...

    After::

        x -> quantize(s') -> op' -> ...

    What ``s'`` and ``op'`` are, the op says: see :mod:`qfuse.optimize.commute`. The op stays as it
    is for its other users.

    Refuses: what the op refuses; quantized values that leave the graph, whose memory would be shown
    by a view; a user that may depend on strides where they change. Does not pay where the two
    orders cost differently and this one costs more.
    """

    name = "lift-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT
    families: ClassVar[Families] = COMMUTING

    def match(self, node: Node) -> LiftQuantizeSite | Miss:
        """Match a quantize of an op that it rises above."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        op = commuting(quantize.x, self.families)
        if op is None:
            text = "it does not quantize an op that it can rise above"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        crossing = op if isinstance(op, Miss) else op.lift(quantize)
        if isinstance(crossing, Miss):
            return crossing
        stored = quantize.params.spec.dtype
        with torch.no_grad():
            values = [torch.empty_like(tensor_of(e.node), dtype=stored) for e in crossing.ends]
        (made,) = crossing.apply(FakeMover(), values)
        wrong = refuse_layout(node, made, moves=crossing.apply is not unchanged)
        return wrong or LiftQuantizeSite(quantize, crossing)

    def gain(self, site: LiftQuantizeSite, cost: CostModel) -> float | None:
        """Compare what is quantized, and what is copied, before and after."""
        work = site.crossing.work
        return None if work is None else saved(cost, *work())

    def rewrite(self, site: LiftQuantizeSite, rw: Rewriter) -> None:
        """Quantize every operand, the same one with the same parameters once; apply the op."""
        made: dict[Hashable, Node] = {}
        values = []
        for end in site.crossing.ends:
            args = end.params(rw).call_args(end.node)
            if args not in made:
                made[args] = rw.call(ops.quantize, *args)
            values.append(made[args])
        (q,) = site.crossing.apply(GraphMover(rw), values)
        rw.replace(site.quantize.node, q)
