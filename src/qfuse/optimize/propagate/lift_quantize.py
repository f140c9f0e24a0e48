"""Lift quantize above ops that commute with it, toward the op that computes its operand."""

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
from qfuse.optimize.match.move_qparams import FakeMover, GraphMover
from qfuse.optimize.match.strides import refuse_layout
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class LiftQuantizeSite:
    """A quantize, and what replaces it and its operand."""

    quantize: Quantize
    crossing: Crossing


class LiftQuantize(Rule[LiftQuantizeSite]):
    """``quantize(op(x), s)`` becomes ``op'(quantize(x, s'))`` for every op that allows it.

    Before::

        x -> op -> quantize(s) -> ...

    After::

        x -> quantize(s') -> op' -> ...

    The op defines ``s'`` and ``op'``: see :mod:`qfuse.optimize.commute`. The float op stays for its
    other users.

    Refuses: what the op refuses; quantized values that leave the graph and would become a view
    that shares memory; a user that may depend on strides that change. Does not pay where the new
    order costs more.
    """

    name = "lift-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT
    families: ClassVar[Families] = COMMUTING

    def match(self, node: Node) -> LiftQuantizeSite | Miss:
        """Match a quantize of an op that it can cross."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        op = commuting(quantize.x, self.families)
        if op is None:
            text = "its operand is not an op that a quantize can cross"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        crossing = op if isinstance(op, Miss) else op.lift(quantize)
        if isinstance(crossing, Miss):
            return crossing
        # Only dtype and strides matter here: the quantized
        # operands are made when the rule rewrites.
        stored = quantize.params.spec.dtype
        with torch.no_grad():
            values = [torch.empty_like(tensor_of(e.node), dtype=stored) for e in crossing.ends]
        # On fake tensors, since a match must not add nodes.
        (made,) = crossing.apply(FakeMover(), values)
        wrong = refuse_layout(node, made, moves=crossing.apply is not unchanged)
        return wrong or LiftQuantizeSite(quantize, crossing)

    def gain(self, site: LiftQuantizeSite, cost: CostModel) -> float | None:
        """Compare the bytes that are quantized and copied, before and after."""
        return site.crossing.gain(cost)

    def rewrite(self, site: LiftQuantizeSite, rw: Rewriter) -> None:
        """Quantize every operand, equal ones once, and apply the op to the quantized values."""
        made: dict[Hashable, Node] = {}
        values = []
        for end in site.crossing.ends:
            # Nodes compare by identity, so equal arguments are the same operand and parameters, as
            # for the two parts of `cat([x, x])`.
            args = end.params(rw).call_args(end.node)
            if args not in made:
                made[args] = rw.call(ops.quantize, *args)
            values.append(made[args])
        (q,) = site.crossing.apply(GraphMover(rw), values)
        rw.replace(site.quantize.node, q)
