"""Fold a constant factor after a linear or convolution into the scale of its weight."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.optimize.fold.affine import AffineSite, affine_site, constant_per_channel, fold, foldable
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


class FoldScale(Rule[AffineSite]):
    """``linear(x, dequantize(w, s), b) * c`` becomes ``linear(x, dequantize(w, s * c), b * c)``.

    Before::

        w, s -> dequantize -> conv -> mul(c)

    After::

        w, s * c -> dequantize -> conv

    The factor is a number, or one number per output channel; a quotient is a product with the
    inverse. The same for convolutions of all kinds.

    Rounding: scale and bias are rounded after the product instead of the result.

    Refuses: a factor that is computed at run time, that varies along other axes, or that is not
    finite; a product or weight with other users; weights other than with float32 scales for the
    tensor or for each output channel; scales that would be 0 or leave the range of float32.
    """

    name = "fold-scale"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.mul.Tensor, aten.div.Tensor)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> AffineSite | Miss:
        """Match a product of a foldable op and a constant."""
        a = arguments(node)
        first = self._match_side(node, a["self"], a["other"])
        # `c / conv(x)` is not linear in the product.
        if not isinstance(first, Miss) or is_call(node, aten.div.Tensor):
            return first
        second = self._match_side(node, a["other"], a["self"])
        if not isinstance(second, Miss):
            return second
        return max(first, second, key=lambda miss: miss.progress)

    def _match_side(self, node: Node, product: object, other: object) -> AffineSite | Miss:
        into = foldable(product, node)
        if isinstance(into, Miss):
            return into
        factor = constant_per_channel(into, other, node)
        if isinstance(factor, Miss):
            return factor
        if is_call(node, aten.div.Tensor):
            if bool((factor == 0).any()):
                return Miss(MissCode.RANGE, node, "it divides by 0", progress=2)
            factor = 1 / factor
        none = torch.zeros((), dtype=torch.float64)
        return affine_site(into, node, node, factor=factor, shift=none)

    def rewrite(self, site: AffineSite, rw: Rewriter) -> None:
        """Replace the product by the op with another scale."""
        rw.replace(site.node, fold(site, rw))
