"""The quantized values of torchao's ``to_mx``, computed op by op."""

from __future__ import annotations

from torch.fx import Node

from qfuse.ir import ops
from qfuse.ir.choose_spec import Formula
from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.views import dtype_of
from qfuse.normalize.movement import sized_view, sizes_argument
from qfuse.normalize.mx_pattern import BLOCKS, MxBlocks, choose_spec, mx_spec, scaled_blocks
from qfuse.rewrite.pattern import Match, PatternRule, cast, where
from qfuse.rewrite.rewriter import Rewriter


def _is_stored(node: Node, mx_blocks: MxBlocks) -> bool:
    return dtype_of(node) is mx_blocks.stored


class NormalizeMxQuantize(PatternRule):
    """Numbers divided by a power of two of their block become a ``qfuse.quantize``.

    Before::

        x -> view in blocks -> mul(the reciprocals) -> clamp -> cast to float8

    After::

        x -> qfuse.quantize(the scales) -> view in blocks

    Refuses: a spelling of another version; a cast to ``float8_e5m2`` without a clamp, which makes
    infinities of what is beyond the range.
    """

    name = "normalize-mx-quantize"
    exactness = Exactness.EXACT
    pattern = cast(scaled_blocks()).given(
        where(_is_stored, MissCode.PATTERN, "{node} is not the type that the scales are for")
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Quantize what was viewed in blocks, and view that."""
        blocks = site[BLOCKS]
        scale = rw.item(rw.call(ops.choose_qparams, blocks.x, str(choose_spec(blocks))), 0)
        reciprocal = blocks.rounding is Formula.MX_RCEIL
        real = dtype_of(blocks.x)
        spec = mx_spec(blocks.stored, blocks.block, real, reciprocal=reciprocal)
        q = rw.call(ops.quantize, blocks.x, scale, None, str(spec))
        if blocks.x is not blocks.node:
            q = sized_view(rw, q, sizes_argument(blocks.node))
        rw.replace(site.node, q)
