"""``addmm`` with a weight is a linear with a bias."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.ops.views import node_of
from qfuse.normalize.aten.linear.base import (
    LinearFrom,
    ProductSite,
    bias_refusal,
    not_a_linear,
    scaling_refusal,
)
from qfuse.rewrite.prelude import Exactness, Miss, Node, OpOverload, arguments


class LinearFromAddmm(LinearFrom):
    """``addmm(b, x, w)`` with a weight ``w`` becomes ``linear(x, t(w), b)``.

    Before::

        b --------+
        x --------+-> addmm
        w -> t ---+

    After::

        x, w, b -> linear

    Exact: ``linear`` of a matrix with a bias is this very call.

    Refuses: ``alpha`` or ``beta`` other than 1; a summand that is not one number per output
    feature, such as one per row or a whole matrix; factors that are both computed at run time.
    """

    name = "linear-from-addmm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.addmm.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ProductSite | Miss:
        """Match a sum of a bias and a product whose right factor is a weight."""
        a = arguments(node)
        weight, bias = node_of(a["mat2"]), node_of(a["self"])
        return (
            not_a_linear(weight)
            or scaling_refusal(node)
            or bias_refusal(node, bias)
            or ProductSite(node, node_of(a["mat1"]), weight, bias)
        )
