"""Fuse an attention of dequantized tensors, for backends that claim it."""

from __future__ import annotations

from typing import ClassVar

from qfuse.ir.ops.claimed.attention import Attention, AttentionSpec
from qfuse.ir.ops.views import node_of, optional_node
from qfuse.optimize.claimed.site import BetweenSite, with_quantize_behind
from qfuse.optimize.fuse.operands import stored_edge
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


class FuseAttention(Rule[BetweenSite]):
    """An attention of dequantized tensors becomes ``qfuse.scaled_dot_product_attention``.

    Before::

        q -> dequantize --.
        k -> dequantize --+-- scaled_dot_product_attention -- quantize -- ...
        v -> dequantize --'

    After::

        q, k, v -> qfuse.scaled_dot_product_attention -- ...

    Some of queries, keys and values may be float, and the result is float if it is not quantized,
    or has other users. A mask, constant or not, stays an operand. It is fused only for a backend
    that claims ``qfuse.scaled_dot_product_attention``.

    Refuses: an attention of which neither an operand nor the result is quantized; dropout; a scale
    that is computed at run time; a mask together with a causal one; dtypes and shapes that torch
    refuses, or that are not known to fit.
    """

    name = "fuse-attention"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.scaled_dot_product_attention.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> BetweenSite | Miss:
        """Match an attention that reads or feeds quantized values."""
        a = arguments(node)
        query, key, value = (stored_edge(node_of(a[name])) for name in ("query", "key", "value"))
        scale, causal, grouped = a["scale"], a["is_causal"], a["enable_gqa"]
        if a["dropout_p"] != 0.0:
            return Miss(MissCode.ARGUMENT, node, "it drops weights at random", progress=1)
        if not isinstance(scale, (int, float, type(None))):
            return Miss(MissCode.ARGUMENT, node, "its scale is computed at run time", progress=1)
        spec = AttentionSpec(bool(causal), None if scale is None else float(scale), bool(grouped))
        mask = optional_node(a["attn_mask"])
        fused = Attention(node, *query, *key, *value, mask, None, spec)
        wrong = next(fused.problems(), None)
        if wrong is not None:
            return Miss(MissCode.ARGUMENT, node, "its operands are {}", wrong, progress=1)
        site = with_quantize_behind(fused, node)
        if all(edge[1] is None for edge in (query, key, value)) and site.last is node:
            text = "neither its operands nor its result are quantized"
            return Miss(MissCode.NOT_QUANTIZED, node, text, progress=0)
        return site

    def rewrite(self, site: BetweenSite, rw: Rewriter) -> None:
        """Insert the op."""
        site.insert(rw)
