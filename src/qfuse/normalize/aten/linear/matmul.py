"""``matmul`` of an activation and a weight is a linear."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.ops.views import node_of, shape_of
from qfuse.normalize.aten.linear.base import LinearFrom, ProductSite, not_a_linear
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, arguments

_MATRIX = 2


class LinearFromMatmul(LinearFrom):
    """``matmul(x, w)`` becomes ``linear(x, t(w))``, and ``matmul(w, v)`` of a vector ``v`` too.

    Before::

        x [..., K] --+
        w [K, N] ----+-> matmul

    After::

        x, t(w) -> linear

    Exact: ``linear`` without a bias is this very call.

    Refuses: two factors that are computed at run time; a weight of another rank than 2, which is
    a different matrix per batch entry.
    """

    name = "linear-from-matmul"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.matmul.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ProductSite | Miss:
        """Match a product with one weight; the other factor may be a vector on either side."""
        a = arguments(node)
        left, right = node_of(a["self"]), node_of(a["other"])
        if len(shape_of(right)) == 1 and len(shape_of(left)) == _MATRIX:
            return not_a_linear(left) or ProductSite(node, right, left, rows=True)
        if len(shape_of(right)) != _MATRIX:
            text = "the right factor has rank {}, a linear's weight has 2"
            return Miss(MissCode.SHAPE, right, text, len(shape_of(right)), progress=0)
        return not_a_linear(right) or ProductSite(node, left, right)
