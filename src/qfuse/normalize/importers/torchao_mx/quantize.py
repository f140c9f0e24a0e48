"""The stored numbers of torchao's ``to_mx``, computed op by op."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.choose import Formula
from qfuse.normalize.importers.torchao_mx.patterns import (
    MxBlocks,
    choose_spec,
    mx_spec,
    read_factor,
)
from qfuse.normalize.match.views import sized_view, sizes_argument
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


class NormalizeMxQuantize(Rule[tuple["Node", MxBlocks]]):
    """Numbers divided by a power of two of their block become a ``qfuse.quantize``.

    Before::

        x -> view in blocks -> mul(the reciprocals) -> clamp -> cast to float8

    After::

        x -> qfuse.quantize(the scales) -> view in blocks

    Refuses: a spelling of another version; a cast to ``float8_e5m2`` without a clamp, which makes
    infinities of what is beyond the range.
    """

    name = "normalize-mx-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten._to_copy.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> tuple[Node, MxBlocks] | Miss:
        """Match a cast of numbers that were scaled by blocks."""
        source = cast_source(node)
        blocks = None if source is None else read_factor(source)
        if blocks is None or blocks.stored is not dtype_of(node):
            return Miss(MissCode.PATTERN, node, "it casts no scaled blocks", progress=0)
        return node, blocks

    def rewrite(self, site: tuple[Node, MxBlocks], rw: Rewriter) -> None:
        """Quantize what was viewed in blocks, and view that."""
        node, blocks = site
        scale = rw.item(rw.call(ops.choose_qparams, blocks.x, str(choose_spec(blocks))), 0)
        reciprocal = blocks.rounding is Formula.MX_RCEIL
        real = dtype_of(blocks.x)
        spec = mx_spec(blocks.stored, blocks.block, real, reciprocal=reciprocal)
        q = rw.call(ops.quantize, blocks.x, scale, None, str(spec))
        if blocks.x is not blocks.node:
            q = sized_view(rw, q, sizes_argument(blocks.node))
        rw.replace(node, q)
