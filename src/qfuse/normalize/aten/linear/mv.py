"""``mv`` with a weight is a linear of one vector."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.ops.views import node_of
from qfuse.normalize.aten.linear.base import LinearFrom, ProductSite, not_a_linear
from qfuse.rewrite.prelude import Exactness, Miss, Node, OpOverload, arguments


class LinearFromMv(LinearFrom):
    """``mv(w, x)`` with a weight ``w [N, K]`` becomes ``linear(x, w)``.

    Exact: ``linear`` of a vector is this very call.

    Refuses: a matrix that is computed at run time.
    """

    name = "linear-from-mv"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.mv.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ProductSite | Miss:
        """Match a weight times a vector."""
        a = arguments(node)
        weight = node_of(a["self"])
        return not_a_linear(weight) or ProductSite(node, node_of(a["vec"]), weight, rows=True)
