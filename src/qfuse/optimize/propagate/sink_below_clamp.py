"""Cut stored numbers off, and dequantize them after that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import bits_equal, tensor_of
from qfuse.optimize.match.clamp import CLAMPS, Clamp, as_clamp
from qfuse.optimize.match.dequant_table import table_of
from qfuse.optimize.propagate.sink_dequantize import refuse_sunk, refuse_users
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule, aten


@dataclass(frozen=True, slots=True)
class SinkBelowClampSite:
    """A clamp, the dequantize that it reads, and its bounds as stored numbers.

    Attributes:
        clamp: The clamp.
        dequantize: What it reads.
        low: The least stored number that stays, ``None`` if all small ones do.
        high: The greatest stored number that stays, ``None`` if all great ones do.
    """

    clamp: Clamp
    dequantize: Dequantize
    low: int | None
    high: int | None


class SinkBelowClamp(Rule[SinkBelowClampSite]):
    """``relu(dequantize(q))`` becomes ``dequantize(clamp(q, zero_point))``.

    Before::

        q -> dequantize(s) -> clamp(a, b) -> ...

    After::

        q -> clamp(c, d) -> dequantize(s) -> ...

    It is proved by looking at all stored numbers of all blocks. Where none is cut off, the clamp
    goes.

    Refuses: a bound that no stored number stands for, or another one in every block; parameters
    that are computed at run time, since the bounds are in the graph; a dequantize that something
    else reads too; storage of too many numbers.
    """

    name = "sink-below-clamp"
    anchors: ClassVar[tuple[OpOverload, ...]] = CLAMPS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SinkBelowClampSite | Miss:
        """Match a clamp of a dequantize that stored numbers can say."""
        clamp = as_clamp(node)
        dequantize = None if clamp is None else as_dequantize(clamp.x)
        if clamp is None or dequantize is None:
            return Miss(MissCode.PATTERN, node, "it does not clamp a dequantize", progress=0)
        bounds = refuse_users(dequantize, node) or _bounds(clamp, dequantize)
        if isinstance(bounds, Miss):
            return bounds
        wrong = refuse_sunk(node, tensor_of(dequantize.q))
        return wrong or SinkBelowClampSite(clamp, dequantize, *bounds)

    def rewrite(self, site: SinkBelowClampSite, rw: Rewriter) -> None:
        """Clamp the stored numbers, and dequantize that."""
        q, params = site.dequantize.q, site.dequantize.params
        if (site.low, site.high) != (None, None):
            q = rw.call(aten.clamp.default, q, site.low, site.high)
        real = rw.call(ops.dequantize, *params.call_args(q))
        rw.replace(site.clamp.node, real)


def _bounds(clamp: Clamp, dequantize: Dequantize) -> tuple[int | None, int | None] | Miss:
    table = table_of(dequantize.params)
    if isinstance(table, Miss):
        return table
    cut = clamp(table.reals)
    codes = torch.arange(table.low, table.high + 1, device=cut.device)
    kept = codes[(cut == table.reals).all(1)]
    if kept.numel():
        low, high = int(kept[0]), int(kept[-1])
        if bits_equal(table.reals[codes.clamp(low, high) - table.low], cut):
            return None if low == table.low else low, None if high == table.high else high
    text = "no stored number stands for a bound of {} in all blocks"
    return Miss(MissCode.ZERO_POINT, clamp.node, text, op_name(clamp.node), progress=3)
