"""``baddbmm`` with one weight for every batch entry is a linear with a bias."""

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
    shared_matrix,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, arguments


class LinearFromBaddbmm(LinearFrom):
    """``baddbmm(b, x, expand(w))`` becomes ``linear(x, t(w), b)``.

    Before::

        b ---------------------------+
        x [B, S, K] -----------------+-> baddbmm
        w [K, N] -> expand, view ----+

    After::

        x, t(w), b -> linear

    Rounding: a product per batch entry becomes one product of all rows, which the library may sum
    in another order.

    Refuses: ``alpha`` or ``beta`` other than 1; a summand that is not one number per output
    feature; a right factor that differs between batch entries, or is computed at run time.
    """

    name = "linear-from-baddbmm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.baddbmm.default,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> ProductSite | Miss:
        """Match a sum of a bias and a batched product that repeats one weight."""
        a = arguments(node)
        weight, bias = shared_matrix(a["batch2"]), node_of(a["self"])
        if weight is None:
            text = "the batch entries do not share one weight"
            return Miss(MissCode.PATTERN, node_of(a["batch2"]), text, progress=0)
        return (
            not_a_linear(weight)
            or scaling_refusal(node)
            or bias_refusal(node, bias)
            or ProductSite(node, node_of(a["batch1"]), weight, bias)
        )
