"""Write an integer product with the weight on the left as one with the weight on the right."""

from __future__ import annotations

from qfuse.ir.ops.views import node_of
from qfuse.normalize.aten.int_matmul.products import has_weight_on_the_left
from qfuse.normalize.aten.linear.weights import transposed
from qfuse.rewrite.pattern import Match, PatternRule, V, op, where
from qfuse.rewrite.prelude import Exactness, MissCode, Rewriter, arguments, aten

_TEXT = "it is not a product of a constant 8-bit weight and an 8-bit activation"


class SwapFactors(PatternRule):
    """``mm(w, t(x))`` of integers with a constant ``w`` becomes ``t(mm(x, t(w)))``.

    Before::

        const w int8, x int8 -> t -> mm

    After::

        x int8, const w int8 -> t -> mm -> t

    Exact: the same products are summed, and sums of integers do not depend on the order.

    Refuses: factors that are not 8-bit integers; a product whose right factor is the weight.
    """

    name = "swap-factors"
    exactness = Exactness.EXACT
    pattern = (
        op(aten.mm.default, V("left"), V("right"))
        .given(where(has_weight_on_the_left, MissCode.PATTERN, _TEXT))
        .core()
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Multiply the transposed factors in the other order, and transpose the result."""
        a = arguments(site.node)
        left, right = node_of(a["self"]), node_of(a["mat2"])
        y = rw.call(aten.mm.default, transposed(rw, right), transposed(rw, left))
        rw.replace(site.node, rw.call(aten.t.default, y))
