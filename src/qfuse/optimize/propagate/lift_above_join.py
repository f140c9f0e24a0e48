"""Quantize what is joined instead of the joined tensor."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost.model import CostModel
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.movement.base import Moved, move_levels
from qfuse.ir.movement.slice import Slice
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import shape_of, tensor_of
from qfuse.ir.quant.block import MoveFailure, covers
from qfuse.optimize.match.concat import JOINS, Join, as_join
from qfuse.optimize.match.memory_cost import passed, saved
from qfuse.optimize.match.move_qparams import FakeMover, GraphMover, moved_params
from qfuse.optimize.propagate.lift_quantize import refuse_layout
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class LiftAboveJoinSite:
    """A quantize, the join that it reads, and how the parameters move to every part."""

    quantize: Quantize
    join: Join
    moved: tuple[Moved, ...]


class LiftAboveJoin(Rule[LiftAboveJoinSite]):
    """``quantize(cat([a, b]), s)`` becomes ``cat([quantize(a, s_a), quantize(b, s_b)])``.

    Before::

        a --.
        b --+-> cat -> quantize(s) -> ...

    After::

        a -> quantize(s_a) --.
        b -> quantize(s_b) --+-> cat -> ...

    Every part takes its own part of the parameters. The same holds for ``stack``.

    Refuses: parts of several dtypes or ranks, which cat promotes or skips; a block that spans two
    parts; sizes along the axis that are not known, if blocks follow it; stored numbers that leave
    the graph. Does not pay where the joined real numbers are needed as well.
    """

    name = "lift-above-join"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> LiftAboveJoinSite | Miss:
        """Match a quantize of a join whose parts begin with blocks."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        if not is_call(quantize.x, *JOINS):
            return Miss(MissCode.PATTERN, node, "it does not quantize a join", progress=0)
        join = as_join(quantize.x)
        if join is None:
            text = "{} joins tensors of several dtypes or ranks"
            return Miss(MissCode.DTYPE, quantize.x, text, op_name(quantize.x), progress=2)
        moved = _moved(quantize, join)
        if isinstance(moved, Miss):
            return moved
        stored = quantize.params.spec.dtype
        with torch.no_grad():
            parts = [torch.empty_like(tensor_of(part), dtype=stored) for part in join.parts]
        wrong = refuse_layout(node, join.apply(FakeMover(), parts))
        return wrong or LiftAboveJoinSite(quantize, join, moved)

    def gain(self, site: LiftAboveJoinSite, cost: CostModel) -> float | None:
        """Compare joining real numbers with joining stored ones."""
        spec, join = site.quantize.params.spec, site.join
        before = [passed(join.node, spec.real, spec.dtype)]
        if all(is_call(user, ops.quantize) for user in join.node.users):
            before.append(passed(join.node, spec.real, spec.real))
        after = [passed(part, spec.real, spec.dtype) for part in join.parts]
        after.append(passed(join.node, spec.dtype, spec.dtype))
        return saved(cost, before, after)

    def rewrite(self, site: LiftAboveJoinSite, rw: Rewriter) -> None:
        """Quantize every part, the same one with the same parameters once, and join that."""
        made: dict[Hashable, Node] = {}
        parts = []
        for part, moved in zip(site.join.parts, site.moved, strict=True):
            params = moved_params(rw, site.quantize.params, [moved])
            key = params.call_args(part)
            if key not in made:
                made[key] = rw.call(ops.quantize, *key)
            parts.append(made[key])
        rw.replace(site.quantize.node, site.join.apply(GraphMover(rw), parts))


def _moved(quantize: Quantize, join: Join) -> tuple[Moved, ...] | Miss:
    spec = quantize.params.spec
    found: list[Moved] = []
    for piece in join.pieces():
        unknown = isinstance(piece, Slice) and None in piece.bounds
        size = shape_of(join.node)[join.axis]
        levels = (spec.block, *(() if spec.outer is None else (spec.outer,)))
        if unknown and not all(covers(block[join.axis], size) for block in levels):
            moved: Moved | MoveFailure = MoveFailure(
                f"the sizes along axis {join.axis} are not known"
            )
        else:
            moved = move_levels(piece.forward, spec.block, spec.outer)
        if isinstance(moved, MoveFailure):
            return Miss(
                MissCode.GRANULARITY,
                join.node,
                "{} parameters in blocks of {} do not come apart above {}: {}",
                spec.granularity(shape_of(quantize.x)),
                spec.block_text(),
                op_name(join.node),
                moved.reason,
                progress=2,
            )
        found.append(moved)
    return tuple(found)
