"""Fuse repeated key and value heads into grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import node_of, shape_of
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import Size, same_shape, same_size
from qfuse.optimize.match.repeated_heads import HEADS, RepeatedHeads, repeated_heads
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
class SharedHeads:
    """Keys or values ``[batch, heads, positions, width]`` whose heads are repeated.

    Attributes:
        repeated: How they are repeated.
        dequantize: What dequantizes the repeated heads, if they are quantized.
    """

    repeated: RepeatedHeads
    dequantize: Dequantize | None

    @property
    def lead(self) -> list[Size]:
        """The sizes of the batch and of the heads before they are repeated."""
        batch, heads = shape_of(self.repeated.value)[:2]
        return [batch, int(heads) // self.repeated.count]

    def without_copies(self, rw: Rewriter) -> Node:
        """Return each head once, dequantized if the repeated ones are."""
        heads = self.repeated.without_copies([int(self.lead[1])], rw)
        if self.dequantize is None:
            return heads
        block = self._block()
        assert not isinstance(block, Refusal), "it was matched"
        params = self.dequantize.params
        params = replace(params, spec=params.spec.with_block(block))
        stored = replace(self.dequantize, q=heads, params=params)
        return rw.call(ops.dequantize, *stored.call_args())

    def _block(self) -> Block | Refusal:
        assert self.dequantize is not None, "floats have no block"
        block = self.dequantize.params.spec.block
        heads = self.repeated.block_of_heads(block[HEADS])
        if isinstance(heads, Refusal):
            return heads
        return (*block[:HEADS], heads, *block[HEADS + 1 :])

    def refusal(self) -> Miss | None:
        """Refuse parameters that do not fit single heads."""
        if self.dequantize is None:
            return None
        node, params = self.dequantize.node, self.dequantize.params
        if params.outer_scale is not None:
            text = "the scales of repeated heads have two levels"
            return Miss(MissCode.GRANULARITY, node, text, progress=2)
        block = self._block()
        if isinstance(block, Refusal):
            text = "{}, in blocks of {}"
            details = block.reason, params.spec.block_text()
            return Miss(MissCode.GRANULARITY, node, text, *details, progress=2)
        return None


@dataclass(frozen=True, slots=True)
class RepeatedHeadsSite:
    """An attention, and the keys and values before they were repeated."""

    node: Node
    key: SharedHeads
    value: SharedHeads


class FuseRepeatedHeads(Rule[RepeatedHeadsSite]):
    """Attention over repeated keys and values becomes grouped attention over the originals.

    Before::

        k [b, 8, s, d] -> unsqueeze -> expand -> clone -> view [b, 16, s, d] --.
        v [b, 8, s, d] -> unsqueeze -> expand -> clone -> view [b, 16, s, d] --attention
        q [b, 16, l, d] -------------------------------------------------------'

    After::

        k, v [b, 8, s, d], q [b, 16, l, d] -> attention (enable_gqa)

    The same for quantized keys and values that are dequantized behind the copies. The removed
    copies have the size of the KV cache times the group, for every decoded token.

    Refuses: keys and values that are repeated differently; scales that differ between copies of a
    head, or have two levels; another number of query heads; queries of another batch or rank, which
    would broadcast; a result with a stride-sensitive user.
    """

    name = "fuse-repeated-heads"
    anchors: ClassVar[tuple[OpOverload, ...]] = (_ATTENTION,)
    exactness = Exactness.EXACT
    # A backend may use another algorithm for grouped heads.
    proof = Exactness.ROUNDING

    def match(self, node: Node) -> RepeatedHeadsSite | Miss:
        """Match an attention whose keys and values are repeated along the heads in the same way."""
        a = arguments(node)
        key, value = (_shared_heads(node_of(a[name])) for name in ("key", "value"))
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
        wrong = self._shapes(node, key, value) or key.refusal() or value.refusal()
        if wrong is not None:
            return wrong
        rigid = stride_sensitive_user(node)
        if rigid is not None:
            text = "{} depends on the strides"
            return Miss(MissCode.ORDER, rigid, text, op_name(rigid), progress=3)
        return RepeatedHeadsSite(node, key, value)

    def _shapes(self, node: Node, key: SharedHeads, value: SharedHeads) -> Miss | None:
        """Refuse queries that broadcast against keys and values, and head counts that differ."""
        a = arguments(node)
        query, repeated = shape_of(node_of(a["query"])), key.repeated.heads
        if len(query) != _RANK or not same_size(query[0], key.lead[0]):
            text = "queries of shape {} broadcast against keys of {}"
            details = tuple(query), tuple(shape_of(key.repeated.value))
            return Miss(MissCode.SHAPE, node, text, *details, progress=3)
        # Query head i uses shared head i // (query heads / shared heads), which is the head that
        # the repetition gave it only if queries have exactly the repeated number of heads.
        if same_size(query[1], repeated) and same_shape(key.lead, value.lead):
            return None
        text = "there are {} heads of queries, {} of keys repeated from {}, values from {}"
        heads = query[1], repeated, key.lead[1], value.lead[1]
        return Miss(MissCode.SHAPE, node, text, *heads, progress=3)

    def rewrite(self, site: RepeatedHeadsSite, rw: Rewriter) -> None:
        """Replace the attention by one on the unrepeated keys and values."""
        a = arguments(site.node)
        found = rw.call(
            _ATTENTION,
            a["query"],
            site.key.without_copies(rw),
            site.value.without_copies(rw),
            *(a[name] for name in ("attn_mask", "dropout_p", "is_causal")),
            scale=a["scale"],
            enable_gqa=True,
        )
        restride(site.node, found, rw)


def _shared_heads(node: Node) -> SharedHeads | None:
    """View keys or values as repeated heads."""
    dequantize = as_dequantize(node)
    repeated = repeated_heads(node if dequantize is None else dequantize.q)
    if repeated is None or repeated.turned or len(shape_of(node)) != _RANK:
        return None
    return SharedHeads(repeated, dequantize)
