"""``mm`` with a weight is a linear."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.ops.views import node_of
from qfuse.normalize.aten.linear.base import LinearFrom, ProductSite, not_a_linear
from qfuse.rewrite.prelude import Exactness, Miss, Node, OpOverload, arguments


class LinearFromMm(LinearFrom):
    """``mm(x, w)`` with a weight ``w`` becomes ``linear(x, t(w))``, and ``t(t(w))`` is ``w``.

    Before::

        w -> t --+
        x -------+-> mm

    After::

        w --+
        x --+-> linear

    Exact: ``linear`` without a bias is this very call on a transposed view of its weight.

    Refuses: two factors that are computed at run time; integer factors.
    """

    name = "linear-from-mm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.mm.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ProductSite | Miss:
        """Match a product whose right factor is a weight."""
        a = arguments(node)
        weight = node_of(a["mat2"])
        return not_a_linear(weight) or ProductSite(node, node_of(a["self"]), weight)
