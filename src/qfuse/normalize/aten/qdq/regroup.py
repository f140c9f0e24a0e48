"""Stored numbers that are split in groups only to be scaled stay in one piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.view_ops import SIZED_VIEWS
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.spec import Block
from qfuse.ir.sizes import same_shape
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.views import sized_view, sizes_argument, with_shape
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

_PAIR = 2


@dataclass(frozen=True, slots=True)
class RegroupSite:
    """A view that joins the last two axes of a dequantize.

    Attributes:
        node: The view.
        dequantize: The dequantize.
        block: Block of the joined tensor.
        groups: Groups along the joined axis.
    """

    node: Node
    dequantize: Dequantize
    block: Block
    groups: int


class RegroupDequantize(Rule[RegroupSite]):
    """``view(dequantize(view(q)))`` becomes ``dequantize(q)`` with one scale per group.

    Before::

        q [N, K] -> view [N, K/g, g] -> dequantize(scale [N, K/g, 1]) -> view [N, K]

    After::

        q [N, K] -> dequantize(scale [N, K/g], block 1xg)

    Refuses: scales of two levels; a view that does anything but join the last two axes; a scale
    that differs within a group, or is shared by groups but not by all.
    """

    name = "regroup-dequantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = SIZED_VIEWS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> RegroupSite | Miss:
        """Match a view of a grouped dequantize."""
        dequantize = as_dequantize(arguments(node)["self"])
        if dequantize is None:
            return Miss(MissCode.PATTERN, node, "it is no view of a dequantize", progress=0)
        if dequantize.params.outer_scale is not None:
            text = "its scales have a second level"
            return Miss(MissCode.GRANULARITY, dequantize.params.outer_scale, text, progress=1)
        split, joined = shape_of(dequantize.node), shape_of(node)
        last = split[-_PAIR:]
        if (
            len(split) != len(joined) + 1
            or not same_shape(split[:-_PAIR], joined[:-1])
            or not all(isinstance(size, int) for size in last)
        ):
            text = "the view does not join the last two axes of {}"
            return Miss(MissCode.SHAPE, node, text, tuple(split), progress=0)
        groups, size = (int(s) for s in last)
        block = _joined(dequantize.params.spec.block, groups, size)
        if block is None:
            text = "blocks of {} are not groups of the joined axis"
            blocks = dequantize.params.spec.block_text()
            return Miss(MissCode.GRANULARITY, node, text, blocks, progress=1)
        return RegroupSite(node, dequantize, block, groups if block[-1] is not None else 1)

    def rewrite(self, site: RegroupSite, rw: Rewriter) -> None:
        """Dequantize the joined numbers."""
        params = site.dequantize.params
        shape = shape_of(site.node)
        q = with_shape(site.dequantize.q, shape) or _join(rw, site, site.dequantize.q, None)
        scale = _join(rw, site, params.scale, site.groups)
        zero = params.zero_point and _join(rw, site, params.zero_point, site.groups)
        spec = str(params.spec.with_block(site.block))
        rw.replace(site.node, rw.call(ops.dequantize, q, scale, zero, spec))


def _joined(block: Block, groups: int, size: int) -> Block | None:
    """Return the block after joining the last two axes, of sizes ``groups`` and ``size``."""
    outer, inner = block[-_PAIR:]
    whole = inner is None or inner == size
    if not whole:
        return None
    if outer is None or outer == groups:
        return (*block[:-_PAIR], None)
    return (*block[:-_PAIR], size) if outer == 1 else None


def _join(rw: Rewriter, site: RegroupSite, node: Node, last: int | None) -> Node:
    """Give ``node`` the leading axes that it has, joined, and ``last`` as its last axis."""
    shape = shape_of(node)
    value = constant_of(node)
    end = last if last is not None else int(shape_of(site.node)[-1])
    if value is not None:
        joined = value.reshape([*(int(s) for s in shape[:-_PAIR]), end])
        return derived(rw, node, joined, "joined")
    if all(isinstance(s, int) for s in shape):
        return rw.call(torch.ops.aten.view.default, node, [*shape[:-_PAIR], end])
    return sized_view(rw, node, sizes_argument(site.node), last=end)
