"""Fold a constant summand after a linear or convolution into its bias."""

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


class FoldShift(Rule[AffineSite]):
    """``convolution(x, dequantize(w), b) + c`` becomes ``convolution(x, dequantize(w), b + c)``.

    Before::

        conv(b) -> add(c)

    After::

        conv(b + c)

    The summand is a number, or one number per output channel, possibly times ``alpha``. The same
    for differences and for linears.

    Rounding: bias and summand are added first.

    Refuses: a summand that is computed at run time, that varies along other axes, or that is not
    finite; ``alpha`` or a minus on the side of the op; what :class:`FoldScale` refuses of weights
    and users.
    """

    name = "fold-shift"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.add.Tensor, aten.sub.Tensor)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> AffineSite | Miss:
        """Match a sum of a foldable op and a constant."""
        a = arguments(node)
        alpha = a["alpha"]
        if not isinstance(alpha, (int, float)):
            return Miss(MissCode.ARGUMENT, node, "alpha is not a number", progress=0)
        sign = -float(alpha) if is_call(node, aten.sub.Tensor) else float(alpha)
        first = self._match_side(node, a["self"], a["other"], (1.0, sign))
        if not isinstance(first, Miss):
            return first
        second = self._match_side(node, a["other"], a["self"], (sign, 1.0))
        if not isinstance(second, Miss):
            return second
        return max(first, second, key=lambda miss: miss.progress)

    def _match_side(
        self, node: Node, product: object, other: object, factors: tuple[float, float]
    ) -> AffineSite | Miss:
        """Match a sum of ``product`` and ``other``, each times its factor."""
        into = foldable(product, node)
        if isinstance(into, Miss):
            return into
        summand = constant_per_channel(into, other, node)
        if isinstance(summand, Miss):
            return summand
        # `c - conv(x)` and `add(c, conv(x), alpha=2)`
        # scale the product, which is not a change of bias.
        if factors[0] != 1:
            text = "its operand is multiplied by {} before the addition"
            return Miss(MissCode.ARGUMENT, node, text, factors[0], progress=2)
        one = torch.ones((), dtype=torch.float64)
        return affine_site(into, node, node, factor=one, shift=summand * factors[1])

    def rewrite(self, site: AffineSite, rw: Rewriter) -> None:
        """Replace the sum by the op with another bias."""
        rw.replace(site.node, fold(site, rw))
