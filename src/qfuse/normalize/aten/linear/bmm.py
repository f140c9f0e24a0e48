"""``bmm`` with one weight for every batch entry is a linear."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.ops.views import node_of
from qfuse.normalize.aten.linear.base import LinearFrom, ProductSite, not_a_linear, shared_matrix
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, arguments


class LinearFromBmm(LinearFrom):
    """``bmm(x, expand(w))`` becomes ``linear(x, t(w))``.

    Before::

        x [B, S, K] ----------------+
        w [K, N] -> expand, view ---+-> bmm

    After::

        x, t(w) -> linear

    Rounding: a product per batch entry becomes one product of all rows, which the library may sum
    in another order.

    Refuses: a right factor that differs between batch entries; one that is computed at run time.
    """

    name = "linear-from-bmm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.bmm.default,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> ProductSite | Miss:
        """Match a batched product whose right factor repeats one weight."""
        a = arguments(node)
        weight = shared_matrix(a["mat2"])
        if weight is None:
            text = "the batch entries do not share one weight"
            return Miss(MissCode.PATTERN, node_of(a["mat2"]), text, progress=0)
        return not_a_linear(weight) or ProductSite(node, node_of(a["self"]), weight)
