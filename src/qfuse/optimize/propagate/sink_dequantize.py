"""Sink dequantize below ops that commute with it, toward the op that uses the result."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from qfuse.cost.model import CostModel
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import tensor_of
from qfuse.optimize.commute.base import USERS, Commutes, Crossing
from qfuse.optimize.commute.registry import COMMUTING, Families, commuting
from qfuse.optimize.match.move_qparams import FakeMover, GraphMover
from qfuse.optimize.match.strides import refuse_sunk
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class SinkDequantizeSite:
    """An op, the dequantizes that are its operands, and what replaces them."""

    op: Commutes
    operands: tuple[Dequantize, ...]
    crossing: Crossing


class SinkDequantize(Rule[SinkDequantizeSite]):
    """``op(dequantize(q, s))`` becomes ``dequantize(op'(q), s')`` for every op that allows it.

    Before::

        q -> dequantize(s) -> op -> ...

    After::

        q -> op' -> dequantize(s') -> ...

    The op defines ``s'`` and ``op'``: see :mod:`qfuse.optimize.commute`.

    Refuses: what the op refuses; a dequantize with other users, since it would be computed twice,
    unless the op allows it; strides that would change where the caller or a view observes them;
    collectives, see ``sink-below-collective``. Does not pay where the new order costs more.
    """

    name = "sink-dequantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = tuple(op for kind in COMMUTING for op in kind.ops)
    exactness = Exactness.EXACT
    families: ClassVar[Families] = COMMUTING
    across_ranks: ClassVar[bool] = False

    def match(self, node: Node) -> SinkDequantizeSite | Miss:
        """Match an op with dequantizes that can sink below it."""
        op = commuting(node, self.families)
        reads = op.sources if isinstance(op, Commutes) else node.all_input_nodes
        found = [as_dequantize(source) for source in reads]
        operands = tuple(d for d in found if d is not None)
        if op is None or not operands:
            text = "it has no dequantize that can sink below it"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        if isinstance(op, Miss):
            return op
        for source, dequantize in zip(reads, found, strict=True):
            # A float part has no quantized values, and quantizing it would lose precision.
            if dequantize is None:
                text = "{} joins quantized values with {}"
                details = op_name(node), op_name(source)
                return Miss(MissCode.NOT_QUANTIZED, source, text, *details, progress=2)
        # From cheap to expensive: `sink` may tabulate all quantized values.
        crossing = self._refuse_ranks(op) or _refuse_users(op, operands) or op.sink(operands)
        if isinstance(crossing, Miss):
            return crossing
        values = crossing.apply(FakeMover(), [tensor_of(operand.q) for operand in operands])
        for end, value in zip(crossing.ends, values, strict=True):
            wrong = refuse_sunk(end.node, value, parts=crossing.parts)
            if wrong is not None:
                return wrong
        return SinkDequantizeSite(op, operands, crossing)

    def gain(self, site: SinkDequantizeSite, cost: CostModel) -> float | None:
        """Compare the bytes that are dequantized and copied, before and after."""
        return site.crossing.gain(cost)

    def rewrite(self, site: SinkDequantizeSite, rw: Rewriter) -> None:
        """Apply the op to quantized values, and dequantize every result."""
        mover = GraphMover(rw)
        q = [mover.open(d.q) if site.op.folds else d.q for d in site.operands]
        for end, value in zip(site.crossing.ends, site.crossing.apply(mover, q), strict=True):
            sunk = mover.node(value, "moved")
            rw.replace(end.node, rw.call(ops.dequantize, *end.params(rw).call_args(sunk)))

    def _refuse_ranks(self, op: Commutes) -> Miss | None:
        if not op.across_ranks or self.across_ranks:
            return None
        text = "below {} the scales would be sent too, and all ranks would have to do the same"
        start = op.node.all_input_nodes[0]
        return Miss(MissCode.ORDER, op.node, text, op_name(start), progress=2)


def _refuse_users(op: Commutes, operands: tuple[Dequantize, ...]) -> Miss | None:
    """Refuse a dequantize that would stay for another user and so be computed twice."""
    for dequantize in operands:
        # A second dequantize costs time but changes no value, so the search may stop early.
        for user in islice(dequantize.node.users, USERS):
            if user is not op.node and not op.shares_with(user):
                text = "its dequantize is also used by {}"
                return Miss(MissCode.SHARED, dequantize.node, text, op_name(user), progress=2)
    return None
