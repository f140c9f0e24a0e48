"""Fuse a quantize with static parameters into the product that it reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.product import FusedProduct
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.optimize.fuse.epilogue import open_product, replace_by
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class OutputSite:
    """A fused op and the quantize that is its only user."""

    fused: FusedProduct
    quantize: Quantize


class FuseOutputQuantize(Rule[OutputSite]):
    """``quantize(qfuse.linear(...))`` becomes ``qfuse.linear(..., out=static)``.

    The same for ``qfuse.convolution`` and ``qfuse.matmul``. The range of the quantize is kept as it
    is: it may encode a clamp.

    Refuses: an op with other users, which need its float result; a scale or zero point that is not
    a constant, since it may depend on the op.
    """

    name = "fuse-output-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> OutputSite | Miss:
        """Match a static quantize of an open fused op."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        params = quantize.params
        fused = open_product(quantize.x, node)
        if isinstance(fused, Miss):
            return fused
        for part in params.tensors:
            if constant_of(part) is None:
                text = "its scale or zero point is computed at run time"
                return Miss(MissCode.NOT_CONSTANT, part, text, progress=3)
        return OutputSite(fused, quantize)

    def rewrite(self, site: OutputSite, rw: Rewriter) -> None:
        """Replace the quantize by the op with a quantized output."""
        grown = replace(site.fused, out_params=site.quantize.params)
        replace_by(grown, site.quantize.node, rw)
