"""The quantized values of torchao's ``to_mx``, in exported ATen ops."""

from __future__ import annotations

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.choose import Formula
from qfuse.normalize.importers.torchao_mx.patterns import (
    BLOCKS,
    MxBlocks,
    choose_spec,
    mx_spec,
    scaled_blocks,
)
from qfuse.normalize.match.views import sized_view, sizes_argument
from qfuse.rewrite.pattern import Match, PatternRule, cast, where
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter


def _is_stored(node: Node, mx_blocks: MxBlocks) -> bool:
    return dtype_of(node) is mx_blocks.stored


class NormalizeMxQuantize(PatternRule):
    """Values divided by the power of two of their block become a ``qfuse.quantize``.

    Before::

        x -> view in blocks -> mul(the reciprocals) -> clamp -> cast to float8

    After::

        x -> qfuse.quantize(the scales) -> view in blocks

    Refuses: the code of another torchao version; a cast to ``float8_e5m2`` without a clamp, which
    turns values out of range into infinities.
    """

    name = "normalize-mx-quantize"
    exactness = Exactness.EXACT
    pattern = cast(scaled_blocks()).given(
        where(_is_stored, MissCode.PATTERN, "the scales are not those of {node.dtype}")
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Quantize the tensor before its view as blocks, and view the result as blocks."""
        blocks = site[BLOCKS]
        scale = rw.item(rw.call(ops.choose_qparams, blocks.x, str(choose_spec(blocks))), 0)
        # torchao multiplies by the reciprocal for `rceil` and divides otherwise.
        reciprocal = blocks.rounding is Formula.MX_RCEIL
        real = dtype_of(blocks.x)
        spec = mx_spec(blocks.stored, blocks.block, real, reciprocal=reciprocal)
        q = rw.call(ops.quantize, blocks.x, scale, None, str(spec))
        if blocks.x is not blocks.node:
            q = sized_view(rw, q, sizes_argument(blocks.node))
        rw.replace(site.node, q)
