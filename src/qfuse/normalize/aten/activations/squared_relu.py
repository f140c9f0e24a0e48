"""The square of a ReLU in any spelling becomes a ReLU and a square."""

from __future__ import annotations

from qfuse.ir.graph.schema import is_call
from qfuse.normalize.aten.activations.written_out import follows_quantized_product, keeps_type
from qfuse.patterns.activations import squared
from qfuse.patterns.squared_relu import SQUARED_RELU
from qfuse.patterns.written_out import X
from qfuse.rewrite.pattern import Match, PatternRule, guard
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter, aten


@guard(MissCode.PATTERN, "it is the square of a ReLU already")
def _is_spelled(node: Node) -> bool:
    relu = squared(node)
    return relu is None or not is_call(relu, aten.relu.default)


@guard(
    MissCode.ARITHMETIC,
    "it is 0 where its operand is NaN, and the square of a ReLU is NaN there: compare by <= and "
    "swap the branches, or write relu(x) ** 2",
)
def _agrees_on_nan(keeps_nan: bool) -> bool:
    return keeps_nan


class SpellSquaredRelu(PatternRule):
    """``where(x <= 0, 0, x * x)`` becomes ``square(relu(x))``.

    Before::

        linear -> x -> le(0) ------.
                  x -> mul(x) -----+-> where(.., 0, ..)

    After::

        linear -> x -> relu -> square

    The same for the square of ``maximum(x, 0)``, ``clamp(x, min=0)``, ``threshold(x, 0, 0)``, of a
    ``where`` or ``masked_fill``, and for ``relu(x) * relu(x)``. The two are then one activation of
    the product before them.

    Exact, signs of zeros included.

    Refuses: ``where(x > 0, x * x, 0)``, which is 0 for NaN; zeros that change dtype or shape, and
    negative ones; a value that does not come from a linear or convolution with a dequantized
    operand.
    """

    name = "spell-squared-relu"
    exactness = Exactness.EXACT
    pattern = SQUARED_RELU.given(keeps_type, follows_quantized_product, _is_spelled).core()
    pattern = pattern.given(_agrees_on_nan)

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Call the two ops."""
        relu = rw.call(aten.relu.default, site[X])
        rw.replace(site.node, rw.call(aten.square.default, relu))
