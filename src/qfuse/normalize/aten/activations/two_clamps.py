"""Two clamps become one with two bounds."""

from __future__ import annotations

from qfuse.normalize.aten.activations.written_out import follows_quantized_product, keeps_type
from qfuse.patterns.written_out import HIGH, LOW, TWO_CLAMPS, X
from qfuse.rewrite.pattern import Match, PatternRule, guard
from qfuse.rewrite.prelude import Exactness, MissCode, Rewriter, aten


@guard(MissCode.ARGUMENT, "the bounds {low} and {high} cross, so the order of the clamps counts")
def _is_ordered(low: float, high: float) -> bool:
    return low <= high


class MergeClamps(PatternRule):
    """``clamp_max(relu(x), 6)`` becomes ``clamp(x, 0, 6)``.

    Before::

        linear -> x -> clamp_min -> clamp_max

    After::

        linear -> x -> clamp

    Likewise for the other order, and for ``clamp`` with one bound.

    Refuses: bounds that cross or are NaN; a value that does not come from a linear or convolution
    with a dequantized operand.
    """

    name = "merge-clamps"
    exactness = Exactness.EXACT
    pattern = TWO_CLAMPS.given(keeps_type, follows_quantized_product).core().given(_is_ordered)

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Call the one op."""
        rw.replace(site.node, rw.call(aten.clamp.default, site[X], site[LOW], site[HIGH]))
