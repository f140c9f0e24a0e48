"""Write a quantization that multiplies by 127 and divides by ``amax`` with its scale."""

from __future__ import annotations

from qfuse.normalize.aten.qdq.inverse_scale import (
    NOT_QUANTIZED,
    PEAK,
    TOP,
    has_positive_top,
    is_precise,
    is_rounded,
    peak_is_computed,
    shared_scale,
)
from qfuse.rewrite.pattern import Match, PatternRule, V, guard
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter, aten

X = V("x")


@guard(MissCode.PATTERN, NOT_QUANTIZED)
def _is_quantized(node: Node) -> bool:
    return is_rounded(node)


class ScaleOfProduct(PatternRule):
    """``x * 127 / amax``, rounded, becomes ``x / (amax / 127)``.

    Before::

        x -> mul(127) -> div(amax) -> round -> ...

    After::

        amax -> div(127) -> scale
        x -> div(scale) -> round -> ...

    Rounding: the scale is rounded instead of the product.

    Refuses: what is not rounded behind the quotient; a divisor that is known at compile time;
    float16 and bfloat16.
    """

    name = "scale-of-product"
    exactness = Exactness.ROUNDING
    pattern = (
        ((X * TOP) / PEAK)
        .given(has_positive_top, peak_is_computed, _is_quantized, is_precise)
        .core()
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Divide once, by the scale."""
        scale = shared_scale(rw, site)
        rw.replace(site.node, rw.call(aten.div.Tensor, site[X], scale))
