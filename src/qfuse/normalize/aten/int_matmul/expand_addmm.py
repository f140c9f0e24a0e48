"""Expand ``addmm`` of integers into a product and a sum."""

from __future__ import annotations

from qfuse.ir.ops.views import dtype_of
from qfuse.rewrite.pattern import Match, Num, PatternRule, V, guard, op
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter, aten

X, WEIGHT, SUMMAND = V("x"), V("weight"), V("summand")
ALPHA, BETA = Num("alpha"), Num("beta")


@guard(MissCode.DTYPE, "it is a product of {node.dtype}, which is rounded")
def _is_of_integers(node: Node) -> bool:
    return not dtype_of(node).is_floating_point and not dtype_of(node).is_complex


class ExpandIntAddmm(PatternRule):
    """``addmm(y, x, w, beta, alpha)`` of integers becomes ``alpha * mm(x, w) + beta * y``.

    Before::

        y, x, w int32 -> addmm

    After::

        x, w int32 -> mm -> add(y)

    Exact: integers wrap to the same values in any order.

    Refuses: floats.
    """

    name = "expand-int-addmm"
    exactness = Exactness.EXACT
    pattern = (
        op(aten.addmm.default, SUMMAND, X, WEIGHT, beta=BETA, alpha=ALPHA)
        .given(_is_of_integers)
        .core()
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Multiply, then add; factors of 1 are left out."""
        y = rw.call(aten.mm.default, site[X], site[WEIGHT])
        alpha, beta = site[ALPHA], site[BETA]
        if alpha != 1:
            y = rw.call(aten.mul.Tensor, y, alpha)
        if beta != 0:
            other = site[SUMMAND]
            other = other if beta == 1 else rw.call(aten.mul.Tensor, other, beta)
            y = rw.call(aten.add.Tensor, y, other)
        rw.replace(site.node, y)
