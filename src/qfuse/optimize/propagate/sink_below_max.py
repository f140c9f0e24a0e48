"""Choose the greatest stored number, and dequantize that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.movement.base import Moved
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import shape_of, tensor_of
from qfuse.ir.quant.block import covers
from qfuse.optimize.match.dequant_table import table_of
from qfuse.optimize.match.move_qparams import FakeMover, GraphMover, moved_params
from qfuse.optimize.match.pool import POOLS, Pool, as_pool
from qfuse.optimize.propagate.sink_dequantize import refuse_sunk, refuse_users
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)


@dataclass(frozen=True, slots=True)
class SinkBelowMaxSite:
    """A choice of elements, the dequantize that it reads, and how the parameters move."""

    pool: Pool
    result: Node
    dequantize: Dequantize
    moved: Moved


class SinkBelowMax(Rule[SinkBelowMaxSite]):
    """``max_pool(dequantize(q, s))`` becomes ``dequantize(max_pool(q), s)``.

    Before::

        q -> dequantize(s) -> max_pool2d -> ...

    After::

        q -> max_pool2d -> dequantize(s) -> ...

    Greater stored numbers stand for greater real ones, so the greatest is the same element. What a
    window has of padding is below everything in both. The same holds for ``amax`` and ``amin``.

    Refuses: windows over several blocks; one that holds nothing but padding; indices that are read
    too; parameters that are computed at run time, which may not keep the order; a dequantize that
    something else reads too; other strides.
    """

    name = "sink-below-max"
    anchors: ClassVar[tuple[OpOverload, ...]] = POOLS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SinkBelowMaxSite | Miss:
        """Match a choice among numbers of one block."""
        dequantize = as_dequantize(arguments(node)["self"])
        if dequantize is None:
            text = "it does not choose from a dequantize"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        pool = as_pool(node)
        if pool is None:
            text = "an argument of {} is not known"
            return Miss(MissCode.ARGUMENT, node, text, op_name(node), progress=2)
        if pool.result is None:
            text = "where the elements were found is read too"
            return Miss(MissCode.SHARED, node, text, progress=2)
        wrong = (
            refuse_users(dequantize, node)
            or _refuse_windows(pool, dequantize)
            or _refuse_order(dequantize)
            or refuse_sunk(pool.result, pool.apply(FakeMover(), tensor_of(dequantize.q)))
        )
        moved = pool.forward(dequantize.params.spec.block)
        return wrong or SinkBelowMaxSite(pool, pool.result, dequantize, moved)

    def rewrite(self, site: SinkBelowMaxSite, rw: Rewriter) -> None:
        """Choose from the stored numbers, and dequantize what was chosen."""
        mover = GraphMover(rw)
        q = mover.node(site.pool.apply(mover, mover.open(site.dequantize.q)), "chosen")
        params = moved_params(rw, site.dequantize.params, [site.moved])
        real = rw.call(ops.dequantize, *params.call_args(q))
        rw.replace(site.result, real)


def _refuse_windows(pool: Pool, dequantize: Dequantize) -> Miss | None:
    block, sizes = dequantize.params.spec.block, shape_of(dequantize.q)
    for axis in pool.axes:
        if not covers(block[axis], sizes[axis]):
            text = "{} chooses among elements of several blocks along axis {}"
            return Miss(MissCode.GRANULARITY, pool.node, text, op_name(pool.node), axis, progress=2)
    if not pool.never_empty():
        text = "a window of {} may hold nothing but padding"
        return Miss(MissCode.SHAPE, pool.node, text, op_name(pool.node), progress=3)
    return None


def _refuse_order(dequantize: Dequantize) -> Miss | None:
    table = table_of(dequantize.params)
    return table if isinstance(table, Miss) else None
