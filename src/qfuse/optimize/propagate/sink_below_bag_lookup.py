"""Sink dequantize below the row lookup of an embedding bag."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.cost import size_range
from qfuse.cost.model import CostModel
from qfuse.cost.work import pointwise_work
from qfuse.ir.dtypes import bit_width
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, node_of, results_of, shape_of
from qfuse.ir.quant.block import covers
from qfuse.optimize.match.memory_cost import passed, saved
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)

_BAGS = (
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
    aten._embedding_bag.default,
)


@dataclass(frozen=True, slots=True)
class BagLookupSite:
    """An embedding bag on a dequantized table.

    Attributes:
        node: The bag.
        table: The dequantize of its table.
        indices: The rows that it reads, one axis.
        padding: The row that it skips, or ``None``.
    """

    node: Node
    table: Dequantize
    indices: Node
    padding: int | None


class SinkBelowBagLookup(Rule[BagLookupSite]):
    """``embedding_bag(dequantize(q, s), i)`` becomes a bag of the rows ``i``, dequantized.

    Before::

        q -> dequantize(s) -> embedding_bag(i)

    After::

        q -> embedding(i) -> dequantize(embedding(s, i)) -> embedding_bag(arange)

    Only the rows that are read are dequantized. A padding index is mapped to a row of its own.

    Refuses: a table that is computed at run time; other results of the bag than its sums, since
    they are indices into the table; scales shared by some rows; scales of two levels; a dequantize
    with other users. Does not pay where more rows are read than the table has.
    """

    name = "sink-below-bag-lookup"
    anchors: ClassVar[tuple[OpOverload, ...]] = _BAGS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> BagLookupSite | Miss:
        """Match a bag whose table is dequantized."""
        a = arguments(node)
        table, indices = as_dequantize(node_of(a["weight"])), node_of(a["indices"])
        if table is None:
            return Miss(MissCode.PATTERN, node, "its table is not dequantized", progress=0)
        if len(shape_of(indices)) != 1:
            text = "its indices have the shape {}"
            return Miss(MissCode.SHAPE, indices, text, tuple(shape_of(indices)))
        if any(user.target is not operator.getitem for user in node.users) or set(
            results_of(node)
        ) - {0}:
            text = "its other results are indices into the table"
            return Miss(MissCode.SHARED, node, text)
        return _refuse_table(table) or BagLookupSite(node, table, indices, _padding(node, a, table))

    def gain(self, site: BagLookupSite, cost: CostModel) -> float | None:
        """Compare the elements that are dequantized."""
        spec = site.table.params.spec
        rows, width = shape_of(site.indices)[0], shape_of(site.table.q)[1]
        q, x = bit_width(spec.dtype), bit_width(spec.float_dtype)
        steps = [
            pointwise_work(size_range(rows * width), [read], [write])
            for read, write in ((q, q), (q, x))
        ]
        after = [type(w)(*(one.with_calls(0) for one in w.values)) for w in steps]
        return saved(cost, [passed(site.table.node, spec.dtype, spec.float_dtype)], after)

    def rewrite(self, site: BagLookupSite, rw: Rewriter) -> None:
        """Look up rows and parameters, dequantize, and sum the rows by their places."""
        a, indices = dict(arguments(site.node)), site.indices
        (count,) = rw.sizes(indices, 1)
        made_like = {"dtype": dtype_of(indices), "device": indices.meta["val"].device}
        places = rw.call(aten.arange.default, count, **made_like)
        rows = indices
        if site.padding is not None:
            # No row is skipped by its place, so a first row is added for those that are. Its number
            # is known, also if the number of rows is not.
            first = rw.constant(torch.zeros(1, **made_like), "padding_row")
            rows = rw.call(aten.cat.default, [first, indices])
            skipped = rw.call(aten.eq.Scalar, indices, site.padding)
            behind = rw.call(aten.add.Tensor, places, 1)
            places = rw.call(aten.where.self, skipped, first, behind)
        a["weight"], a["indices"] = _looked_up(site.table, rows, rw), places
        if site.padding is not None:
            a["padding_idx"] = 0
        op = overload_of(site.node)
        assert op is not None, "the anchor is a call of an op"
        if op is aten.embedding_bag.padding_idx and not isinstance(count, int):
            # Its C++ reads the number of rows of the table, which varies here.
            op = aten._embedding_bag.default
            if site.padding is None:
                a["padding_idx"] = -1  # which means none there
        made = rw.call(op, *a.values())
        for index, old in results_of(site.node).items():
            rw.replace(old, rw.item(made, index))


def _refuse_table(table: Dequantize) -> Miss | None:
    spec, others = table.params.spec, [u for u in table.node.users if u.target not in _BAGS]
    if others or len(table.node.users) > 1:
        user = op_name(others[0]) if others else "another bag"
        text = "its dequantize is also used by {}"
        return Miss(MissCode.SHARED, table.node, text, user, progress=2)
    if is_call(table.q, aten.embedding.default):
        # What this rule has made, or rows that the source looked up.
        text = "its rows are looked up before they are dequantized"
        return Miss(MissCode.PATTERN, table.q, text, progress=0)
    if constant_of(table.q) is None:
        return Miss(MissCode.NOT_CONSTANT, table.q, "its table is computed at run time")
    if spec.outer is not None:
        return Miss(MissCode.GRANULARITY, table.node, "its table has scales of two levels")
    if spec.block[0] != 1 and not covers(spec.block[0], shape_of(table.q)[0]):
        text = "rows are read out of blocks of {}"
        return Miss(MissCode.GRANULARITY, table.node, text, spec.block[0], progress=2)
    return None


def _padding(node: Node, a: dict[str, Argument], table: Dequantize) -> int | None:
    padding = a.get("padding_idx")
    if not isinstance(padding, int):
        return None
    if padding >= 0:
        return padding
    # Only the public op counts a negative index from the end; -1 is the inner op's "none".
    size = shape_of(table.q)[0]
    if node.target is aten._embedding_bag.default or not isinstance(size, int):
        return None
    return padding + size


def _looked_up(table: Dequantize, rows: Node, rw: Rewriter) -> Node:
    """Return the dequantized rows."""
    params, shape = table.params, shape_of(table.q)
    one_each = not covers(params.spec.block[0], shape[0])

    def look(values: Node) -> Node:
        return rw.call(aten.embedding.default, values, rows)

    scale, zero = params.scale, params.zero_point
    if one_each:
        scale, zero = look(scale), None if zero is None else look(zero)
    block = (1 if one_each else None, *params.spec.block[1:])
    moved = replace(params, spec=params.spec.with_block(block), scale=scale, zero_point=zero)
    return rw.call(ops.dequantize, *moved.call_args(look(table.q)))
