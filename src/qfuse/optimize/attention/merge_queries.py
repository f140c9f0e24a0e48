"""Merge the queries of one token that share keys and values into one matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.views import node_of, optional_node, shape_of
from qfuse.ir.sizes import Size, same_size
from qfuse.optimize.match.strides import restride, stride_sensitive_user
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

_ATTENTION = aten.scaled_dot_product_attention.default
_RANK = 4  # batch, heads, positions, width of a head


@dataclass(frozen=True, slots=True)
class MergeQueriesSite:
    """An attention of one token in groups of heads.

    Attributes:
        node: The attention.
        heads: Heads of keys and values.
        group: Heads of queries for each.
    """

    node: Node
    heads: int
    group: int


class MergeQueries(Rule[MergeQueriesSite]):
    """Merge the queries of a group of heads, one row per head, into rows of their shared head.

    Before::

        q [b, 16, 1, d], k, v [b, 8, s, d] -> attention (enable_gqa) -- user

    After::

        q -> reshape [b, 8, 2, d], k, v [b, 8, s, d] -> attention -> reshape [b, 16, 1, d] -- user

    Attention then loads keys and values once per group instead of once per head.

    Refuses: several tokens, whose queries would need different masks; causal masks, which depend
    on the row; a mask that differs between heads; batches that broadcast; dropout; a result with
    a stride-sensitive user.
    """

    name = "merge-queries"
    anchors: ClassVar[tuple[OpOverload, ...]] = (_ATTENTION,)
    # Each query was a product of its own, and backends may sum a row of a larger product otherwise.
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> MergeQueriesSite | Miss:
        """Match a grouped attention with queries of one token."""
        a = arguments(node)
        if not a["enable_gqa"]:
            return Miss(MissCode.PATTERN, node, "no heads share keys and values", progress=0)
        query, key, value = (shape_of(node_of(a[name])) for name in ("query", "key", "value"))
        if not (len(query) == len(key) == len(value) == _RANK and same_size(query[2], 1)):
            text = "it has queries of several tokens, or tensors whose rank is not four"
            return Miss(MissCode.SHAPE, node, text)
        # A causal mask would show row 1 of a group one more
        # key than row 0, though both are the same token.
        if a["is_causal"] or a["dropout_p"] != 0.0:
            text = "it has a causal mask or dropout, which depend on the row"
            return Miss(MissCode.ARGUMENT, node, text, progress=2)
        # The reshape of the queries has the batch of the queries in it.
        if not (same_size(query[0], key[0]) and same_size(query[0], value[0])):
            text = (
                "the batches of queries, keys and values are {}, {} and {}, so some are broadcast"
            )
            return Miss(MissCode.SHAPE, node, text, query[0], key[0], value[0], progress=2)
        group = _group(query[1], key[1], value[1])
        if group is None:
            text = "heads of queries, keys and values do not form groups of a known size"
            return Miss(MissCode.SHAPE, node, text, progress=2)
        return self._mask_or_reader(node) or MergeQueriesSite(node, *group)

    def _mask_or_reader(self, node: Node) -> Miss | None:
        mask = optional_node(arguments(node)["attn_mask"])
        # Axes from the right: keys, queries, heads. A size that is absent or 1 applies to all.
        details = shape_of(mask)[-3:-1] if mask is not None else ()
        if mask is not None and not all(same_size(size, 1) for size in details):
            text = "the mask differs between heads"
            return Miss(MissCode.SHAPE, mask, text, progress=3)
        rigid = stride_sensitive_user(node)
        if rigid is not None:
            text = "{} depends on the strides"
            return Miss(MissCode.ORDER, rigid, text, op_name(rigid), progress=3)
        return None

    def rewrite(self, site: MergeQueriesSite, rw: Rewriter) -> None:
        """Make the queries of a group the rows of one head."""
        a = arguments(site.node)
        query = node_of(a["query"])
        batch, many, rows, width = rw.sizes(query, _RANK)
        grouped = rw.call(aten.reshape.default, query, [batch, site.heads, site.group, width])
        found = rw.call(_ATTENTION, grouped, a["key"], a["value"], a["attn_mask"], scale=a["scale"])
        *_, made = rw.sizes(node_of(a["value"]), _RANK)
        apart = rw.call(aten.reshape.default, found, [batch, many, rows, made])
        restride(site.node, apart, rw)


def _group(queries: Size, keys: Size, values: Size) -> tuple[int, int] | None:
    """Return the number of key/value heads, and the number of query heads per key/value head."""
    if not (isinstance(queries, int) and isinstance(keys, int) and same_size(keys, values)):
        return None
    # A size of 0 is legal, and must not be divided by.
    group = queries // max(keys, 1)
    return (keys, group) if group > 1 and group * keys == queries else None
