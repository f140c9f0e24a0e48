"""``mv`` with a weight is a linear of one vector."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from qfuse.ir.events import Exactness
from qfuse.ir.schema import arguments
from qfuse.ir.views import node_of
from qfuse.normalize.linear_from import LinearFrom, ProductSite, not_a_linear

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.fx import Node

    from qfuse.rewrite.rule import Miss

__all__ = ["LinearFromMv"]


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
