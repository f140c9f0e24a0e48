"""Fuse repeated key and value heads into grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.views import node_of, shape_of
from qfuse.ir.sizes import same_shape, same_size
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
_VIEWS: tuple[OpOverload, ...] = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
)
_RANK = 4  # batch, heads, positions, width of a head
_GROUP_AXIS = 2


@dataclass(frozen=True, slots=True)
class RepeatedHeadsSite:
    """An attention, and the keys and values before they were repeated.

    Attributes:
        node: The attention.
        key: Keys [batch, shared heads, positions, width].
        value: Values, likewise.
    """

    node: Node
    key: Node
    value: Node


class FuseRepeatedHeads(Rule[RepeatedHeadsSite]):
    """Attention over repeated keys and values becomes grouped attention over the originals.

    Before::

        k [b, 8, s, d] -> unsqueeze -> expand -> clone -> view [b, 16, s, d] --.
        v [b, 8, s, d] -> unsqueeze -> expand -> clone -> view [b, 16, s, d] --attention
        q [b, 16, l, d] -------------------------------------------------------'

    After::

        k, v [b, 8, s, d], q [b, 16, l, d] -> attention (enable_gqa)

    The removed copies have the size of the KV cache times the group, for every decoded token.

    Refuses: keys and values that are repeated differently; another number of query heads; queries
    of another batch or rank, which would broadcast; a result with a stride-sensitive user.
    """

    name = "fuse-repeated-heads"
    anchors: ClassVar[tuple[OpOverload, ...]] = (_ATTENTION,)
    exactness = Exactness.EXACT
    # A backend may use another algorithm for grouped heads.
    proof = Exactness.ROUNDING

    def match(self, node: Node) -> RepeatedHeadsSite | Miss:
        """Match an attention whose keys and values are repeated along the heads in the same way."""
        a = arguments(node)
        key, value = (_before_repeat(node_of(a[name])) for name in ("key", "value"))
        if key is None and value is None:
            text = "neither keys nor values are repeated"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        # With grouped heads, `scaled_dot_product_attention` repeats both keys and values.
        if key is None or value is None:
            text = "only one of keys and values is repeated in a supported way"
            return Miss(MissCode.PATTERN, node, text, progress=2)
        if a["enable_gqa"]:
            text = "the attention itself repeats the heads again (enable_gqa)"
            return Miss(MissCode.ARGUMENT, node, text, progress=2)
        shapes = self._shapes(node, key, value)
        if shapes is not None:
            return shapes
        rigid = stride_sensitive_user(node)
        if rigid is not None:
            text = "{} depends on the strides"
            return Miss(MissCode.ORDER, rigid, text, op_name(rigid), progress=3)
        return RepeatedHeadsSite(node, key, value)

    def _shapes(self, node: Node, key: Node, value: Node) -> Miss | None:
        """Refuse queries that broadcast against keys and values, and head counts that differ."""
        a = arguments(node)
        query, repeated = shape_of(node_of(a["query"])), shape_of(node_of(a["key"]))[1]
        if len(query) != _RANK or not same_size(query[0], shape_of(key)[0]):
            text = "queries of shape {} broadcast against keys of {}"
            return Miss(MissCode.SHAPE, node, text, tuple(query), tuple(shape_of(key)), progress=3)
        # Query head i uses shared head i // (query heads / shared heads), which is the head that
        # the repetition gave it only if queries have exactly the repeated number of heads.
        if same_size(query[1], repeated) and _alike(key, value):
            return None
        text = "there are {} heads of queries, {} of keys repeated from {}, values from {}"
        heads = query[1], repeated, shape_of(key)[1], shape_of(value)[1]
        return Miss(MissCode.SHAPE, node, text, *heads, progress=3)

    def rewrite(self, site: RepeatedHeadsSite, rw: Rewriter) -> None:
        """Replace the attention by one on the unrepeated keys and values."""
        a = arguments(site.node)
        found = rw.call(
            _ATTENTION,
            a["query"],
            site.key,
            site.value,
            *(a[name] for name in ("attn_mask", "dropout_p", "is_causal")),
            scale=a["scale"],
            enable_gqa=True,
        )
        restride(site.node, found, rw)


def _alike(key: Node, value: Node) -> bool:
    """Whether keys and values have the same batches and heads."""
    return same_shape(shape_of(key)[:2], shape_of(value)[:2])


def _before_repeat(node: Node) -> Node | None:
    """Return the value whose heads ``node`` repeats, each several times in a row."""
    if not is_call(node, *_VIEWS):
        return None
    spread = node_of(arguments(node)["self"])
    # There is no copy where the expanded heads can be viewed, as those of one head can.
    if is_call(spread, aten.clone.default):
        spread = node_of(arguments(spread)["self"])
    if not is_call(spread, aten.expand.default):
        return None
    single = node_of(arguments(spread)["self"])
    if not is_call(single, aten.unsqueeze.default):
        return None
    source = node_of(arguments(single)["self"])
    shape = shape_of(source)
    if len(shape) != _RANK:
        return None
    groups = shape_of(spread)[_GROUP_AXIS]
    heads = shape[1]
    # Products of symbolic sizes cannot be compared without guards.
    if not isinstance(heads, int) or not isinstance(groups, int) or groups < 1:
        return None
    batch, _, positions, width = shape
    # Comparing shapes covers every spelling of the arguments.
    steps = (
        (single, (batch, heads, 1, positions, width)),
        (spread, (batch, heads, groups, positions, width)),
        (node, (batch, heads * groups, positions, width)),
    )
    right = all(same_shape(shape_of(step), want) for step, want in steps)
    return source if right and _adds_group_axis(single) else None


def _adds_group_axis(single: Node) -> bool:
    # A cache of one head or one position has the same shape with the new axis elsewhere.
    axis = arguments(single)["dim"]
    return isinstance(axis, int) and axis % (_RANK + 1) == _GROUP_AXIS
