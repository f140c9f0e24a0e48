"""Undo the split into groups that quantized values get only to be scaled."""

from __future__ import annotations

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.spec import Block
from qfuse.ir.sizes import same_shape
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.views import SIZED_VIEW, sized_view, sizes_argument, with_shape
from qfuse.rewrite.pattern import Capture, Match, PatternRule, Read, Via, guard, let
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten

_PAIR = 2

DEQUANTIZE = Read("dequantize", as_dequantize)
BLOCK = Capture[Block]("block")


@guard(MissCode.SHAPE, "the view does not join the last two axes of a dequantize")
def _joins(node: Node, dequantize: Dequantize) -> bool:
    split, joined = shape_of(dequantize.node), shape_of(node)
    # The last two sizes become the numbers of a block, which has no symbols.
    return (
        len(split) == len(joined) + 1
        and same_shape(split[:-_PAIR], joined[:-1])
        and all(isinstance(size, int) for size in split[-_PAIR:])
    )


@guard(MissCode.GRANULARITY, "its scales have a second level")
def _has_one_level(dequantize: Dequantize) -> bool:
    return dequantize.params.outer_scale is None


def _block(node: Node, dequantize: Dequantize) -> Block | Miss:
    """Return the block after joining the last two axes."""
    *_, groups, size = shape_of(dequantize.node)
    spec = dequantize.params.spec
    lead, (outer, inner) = spec.block[:-_PAIR], spec.block[-_PAIR:]
    whole = inner is None or inner == size
    # One scale for all groups is one per row of the joined axis.
    if whole and (outer is None or outer == groups):
        return (*lead, None)
    if whole and outer == 1:
        return (*lead, int(size))
    text = "blocks of {} are not groups of the joined axis"
    return Miss(MissCode.GRANULARITY, node, text, spec.block_text())


class RegroupDequantize(PatternRule):
    """``view(dequantize(view(q)))`` becomes ``dequantize(q)`` with one scale per group.

    Before::

        q [N, K] -> view [N, K/g, g] -> dequantize(scale [N, K/g, 1]) -> view [N, K]

    After::

        q [N, K] -> dequantize(scale [N, K/g], block 1xg)

    Refuses: scales of two levels; a view that does anything but join the last two axes; a scale
    that differs within a group, or is shared by groups but not by all.
    """

    name = "regroup-dequantize"
    exactness = Exactness.EXACT
    pattern = (
        Via(DEQUANTIZE, SIZED_VIEW).given(_joins).core().given(_has_one_level, let(BLOCK, _block))
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Dequantize the joined values."""
        dequantize, block, view = site[DEQUANTIZE], site[BLOCK], site.node
        params, shape = dequantize.params, shape_of(view)
        groups = 1 if block[-1] is None else int(shape_of(dequantize.node)[-_PAIR])
        q = with_shape(dequantize.q, shape) or _join(rw, view, dequantize.q, int(shape[-1]))
        scale = _join(rw, view, params.scale, groups)
        zero = params.zero_point and _join(rw, view, params.zero_point, groups)
        rw.replace(
            view, rw.call(ops.dequantize, q, scale, zero, str(params.spec.with_block(block)))
        )


def _join(rw: Rewriter, view: Node, node: Node, last: int) -> Node:
    """View ``node`` with its leading axes, joined, and with ``last`` as its last axis."""
    shape = shape_of(node)
    value = constant_of(node)
    if value is not None:
        joined = value.reshape([*(int(s) for s in shape[:-_PAIR]), last])
        return derived(rw, node, joined, "joined")
    if all(isinstance(s, int) for s in shape):
        return rw.call(aten.view.default, node, [*shape[:-_PAIR], last])
    return sized_view(rw, node, sizes_argument(view), last=last)
