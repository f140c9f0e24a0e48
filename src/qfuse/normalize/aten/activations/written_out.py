"""An activation written as arithmetic becomes its op."""

from __future__ import annotations

from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.normalize.match.origin import comes_from_quantized_product
from qfuse.patterns.piecewise import PIECEWISE
from qfuse.patterns.written_out import CALL, WRITTEN_OUT, X
from qfuse.rewrite.pattern import Either, Match, PatternRule, guard
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter


@guard(MissCode.DTYPE, "a constant changes the dtype or shape of the activation")
def keeps_type(node: Node, x: Node) -> bool:
    """Whether the activation has the type of its operand."""
    return dtype_of(node) == dtype_of(x) and same_shape(shape_of(node), shape_of(x))


@guard(MissCode.NOT_QUANTIZED, "the operand does not come from a quantized product", at="x")
def follows_quantized_product(x: Node) -> bool:
    """Whether the op may become part of a quantized linear or convolution."""
    return comes_from_quantized_product(x)


class SpellActivation(PatternRule):
    """``x * sigmoid(x)`` becomes ``silu(x)``, and other activations their ops.

    Before::

        linear -> x -> sigmoid -> mul(x)

    After::

        linear -> x -> silu

    The activations are ``sigmoid``, ``silu``, ``hardsigmoid``, ``hardswish``, both forms of
    ``gelu``, and ``mish``, in every order of their factors; ``leaky_relu`` and ``elu`` written with
    ``where``, and ``prelu`` with one slope. Other users of the values in between keep them.

    Rounding: the steps in between are not rounded to the dtype of ``x``.

    Refuses: other constants, compared as rounded numbers; constants that change dtype or shape; a
    value that does not come from a linear or convolution with a dequantized operand.
    """

    name = "spell-activation"
    exactness = Exactness.ROUNDING
    # Arithmetic is no near miss of an activation, and that of float models is left alone.
    pattern = Either(WRITTEN_OUT, PIECEWISE).given(keeps_type, follows_quantized_product).core()

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Call the one op."""
        call = site[CALL]
        rw.replace(site.node, rw.call(call.op, site[X], **call.settings))
