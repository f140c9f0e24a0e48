"""Join stored numbers, and dequantize them once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.movement.base import TensorMover
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import QuantParams, shape_of, tensor_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import Block, QuantSpec, ZeroPointDomain
from qfuse.optimize.match.concat import JOINS, Join, as_join
from qfuse.optimize.match.move_qparams import FakeMover, GraphMover
from qfuse.optimize.propagate.sink_dequantize import refuse_sunk
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class SinkBelowJoinSite:
    """A join, the dequantizes that it reads, and the spec of the joined numbers.

    Attributes:
        join: The join.
        parts: Its parts.
        spec: With the united range; its block still is that of the parts.
        same: All parts have one scale along the axis, and it is the same one.
    """

    join: Join
    parts: tuple[Dequantize, ...]
    spec: QuantSpec
    same: bool


class SinkBelowJoin(Rule[SinkBelowJoinSite]):
    """``cat([dequantize(a, s_a), dequantize(b, s_b)])`` becomes ``dequantize(cat([a, b]), s)``.

    Before::

        a -> dequantize --.
        b -> dequantize --+-> cat -> ...

    After::

        a --.
        b --+-> cat -> dequantize -> ...

    The parts have equal parameters, or one scale per index of the axis, which are joined like the
    numbers. Ranges unite: dequantizing does not look at them. The same holds for ``stack``.

    Refuses: a part that is no dequantize, or that something else reads; parts with other storage,
    arithmetic or blocks; different scales that are not per index of the axis.
    """

    name = "sink-below-join"
    anchors: ClassVar[tuple[OpOverload, ...]] = JOINS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SinkBelowJoinSite | Miss:
        """Match a join of dequantizes whose parameters can be joined."""
        join = as_join(node)
        if join is None or not any(as_dequantize(part) for part in join.parts):
            return Miss(MissCode.PATTERN, node, "it does not join dequantizes", progress=0)
        parts = []
        for part in join.parts:
            dequantize = as_dequantize(part)
            if dequantize is None:
                text = "{} joins quantized numbers with {}"
                told = op_name(node), op_name(part)
                return Miss(MissCode.NOT_QUANTIZED, part, text, *told, progress=2)
            parts.append(dequantize)
        site = _refuse_users(node, parts) or _joined(join, tuple(parts))
        if isinstance(site, Miss):
            return site
        with torch.no_grad():
            moved = join.apply(FakeMover(), [tensor_of(p.q) for p in parts])
        return refuse_sunk(node, moved) or site

    def rewrite(self, site: SinkBelowJoinSite, rw: Rewriter) -> None:
        """Join the stored numbers and, if they differ, the parameters."""
        q = site.join.apply(GraphMover(rw), [part.q for part in site.parts])
        params = _params(site, rw)
        real = rw.call(ops.dequantize, *params.call_args(q))
        rw.replace(site.join.node, real)


def _refuse_users(node: Node, parts: Sequence[Dequantize]) -> Miss | None:
    for part in parts:
        for user in part.node.users:
            if user is not node:
                text = "one of the dequantizes is also read by {}"
                return Miss(MissCode.SHARED, part.node, text, op_name(user), progress=2)
    return None


def _joined(join: Join, parts: tuple[Dequantize, ...]) -> SinkBelowJoinSite | Miss:
    first = parts[0].params
    for part in parts:
        if part.params.spec.dtype != first.spec.dtype:
            text = "the parts are stored in different dtypes: {} and {}"
            return Miss(MissCode.DTYPE, part.node, text, first.spec, part.params.spec, progress=3)
    low = min(part.params.spec.quant_min for part in parts)
    high = max(part.params.spec.quant_max for part in parts)
    united = replace(first.spec, quant_min=low, quant_max=high)
    for part in parts:
        spec = part.params.spec
        ranged = spec.domain is ZeroPointDomain.FLOAT_OFFSET
        if replace(spec, quant_min=low, quant_max=high) != united or (ranged and spec != united):
            text = "the parts are quantized in different ways: {} and {}"
            return Miss(MissCode.GRANULARITY, part.node, text, first.spec, spec, progress=3)
    same = all(replace(part.params, spec=first.spec).same_as(first) for part in parts)
    site = SinkBelowJoinSite(join, parts, united, same)
    if join.is_stack:
        return site if same else _refuse_zero_points(site) or site
    block = united.block[join.axis]
    if same and all(covers(block, shape_of(part.node)[join.axis]) for part in parts):
        return site
    site = replace(site, same=False)
    if block == 1:
        return _refuse_zero_points(site) or _refuse_outer(site) or site
    text = "the parts have different scales, and not one per index of axis {}"
    return Miss(MissCode.GRANULARITY, join.node, text, join.axis, progress=3)


def _refuse_zero_points(site: SinkBelowJoinSite) -> Miss | None:
    """Refuse parameters that cannot be joined, because dtypes differ or some are not there."""
    for part in site.parts:
        first, own = site.parts[0].params, part.params
        pairs = (
            (first.scale, own.scale),
            (first.zero_point, own.zero_point),
            (first.outer_scale, own.outer_scale),
        )
        for a, b in pairs:
            if (a is None) != (b is None):
                text = "one part has zero points, another has none"
                return Miss(MissCode.ZERO_POINT, part.node, text, progress=3)
            if a is not None and b is not None and tensor_of(a).dtype != tensor_of(b).dtype:
                text = "the parts have parameters of different dtypes"
                return Miss(MissCode.DTYPE, b, text, progress=3)
    return None


def _refuse_outer(site: SinkBelowJoinSite) -> Miss | None:
    """Refuse a second level of scales that is neither the same for all parts nor per index."""
    outer, axis = site.spec.outer, site.join.axis
    if outer is None or outer[axis] == 1 or _same_outer(site):
        return None
    text = "the parts have different second levels of scales, and not one per index of axis {}"
    return Miss(MissCode.GRANULARITY, site.join.node, text, axis, progress=3)


def _same_outer(site: SinkBelowJoinSite) -> bool:
    """Whether one second level of scales, which does not depend on the axis, serves all parts."""
    outer, axis = site.spec.outer, site.join.axis
    first = site.parts[0].params
    alone = [replace(p.params, scale=first.scale, zero_point=first.zero_point) for p in site.parts]
    return outer is not None and all(
        covers(outer[axis], shape_of(part.node)[axis])
        and replace(own, spec=first.spec).same_as(first)
        for part, own in zip(site.parts, alone, strict=True)
    )


def _params(site: SinkBelowJoinSite, rw: Rewriter) -> QuantParams:
    join = site.join
    keeps = not join.is_stack and site.same
    keeps_outer = not join.is_stack and (site.same or _same_outer(site))
    block = _joined_block(site.spec.block, join, same=site.same)
    outer = site.spec.outer
    if outer is not None:
        outer = _joined_block(outer, join, same=site.same or keeps_outer)
    used = site.parts[:1] if site.same else site.parts

    def joined(nodes: Sequence[Node | None], *, keep: bool) -> Node | None:
        known = [node for node in nodes if node is not None]
        if not known:
            return None
        return known[0] if keep else _join_nodes(join, known, rw)

    scale = joined([part.params.scale for part in used], keep=keeps)
    assert scale is not None, "every part has a scale"
    zero = joined([part.params.zero_point for part in used], keep=keeps)
    second = joined([part.params.outer_scale for part in used], keep=keeps_outer)
    return QuantParams(site.spec.with_block(block, outer), scale, zero, second)


def _joined_block(block: Block, join: Join, *, same: bool) -> Block:
    """Return the block of the joined numbers."""
    made = list(block)
    if join.is_stack:
        made.insert(join.axis, None if same else 1)
    elif same:
        made[join.axis] = None
    return tuple(made)


def _join_nodes(join: Join, nodes: list[Node], rw: Rewriter) -> Node:
    mover = GraphMover(rw)
    values = [value for value in map(constant_of, nodes) if value is not None]
    if len(values) == len(nodes):
        return mover.node(join.apply(TensorMover(), values), str(nodes[0].target))
    return mover.node(join.apply(mover, nodes), "joined")
