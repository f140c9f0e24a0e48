"""Fuse the GLU product of a quantized linear's halves where the result stays float."""

from __future__ import annotations

from qfuse.ir.movement.glu_halves import glu_split_of, uncast
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import Mul
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.views import tensor_of
from qfuse.ir.sizes import is_row_major
from qfuse.patterns.gated import A_PRODUCT, GATED, Gated
from qfuse.rewrite.pattern import Match, PatternRule, guard
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter


@guard(MissCode.PATTERN, "its factors are not halves of one quantized linear")
def _has_halves(gated: Gated) -> bool:
    whole = _whole(gated)
    linear = None if whole is None else as_fused_linear(whole)
    # A linear that returns quantized values has no float halves to multiply.
    return linear is not None and linear.out_params is None and bool(gated.steps)


@guard(MissCode.SHAPE, "the product is not row-major")
def _is_row_major(node: Node, gated: Gated) -> bool:
    whole = _whole(gated)
    return whole is not None and is_row_major(tensor_of(node)) and is_row_major(tensor_of(whole))


def _whole(found: Gated) -> Node | None:
    """Return the value whose two halves are multiplied, if the epilogue is a GLU."""
    for step in found.steps:
        if isinstance(step, Mul):
            halves = glu_split_of(found.x, uncast(found.extras[step.index])[1])
            # The other half may be cast before the product.
            return None if halves is None else halves.source
    # The epilogue op names the GLU split; without it the factors are not halves of one tensor.
    return found.x


class FuseGate(PatternRule):
    """``act(g) * u`` of the two halves of a fused linear becomes ``qfuse.activation``.

    Before::

        qfuse.linear -> split -+- g -> silu -.
                               |             +- mul -> user
                               '- u ---------'

    After::

        qfuse.linear -> qfuse.activation -> user

    The result is float. A linear kernel may multiply the halves while they are in registers. A
    product that is quantized afterwards is left to ``fuse-activation-quantize``, which runs first.

    Refuses: factors that are not halves of one quantized linear; operands that broadcast;
    intermediate values with other users; a linear with a quantized output; results that are not
    row-major.
    """

    name = "fuse-gate"
    exactness = Exactness.EXACT
    pattern = A_PRODUCT.given(_has_halves, _is_row_major)

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Insert the op in place of the product."""
        node, found = site.node, site[GATED]
        fused = Activation(node, found.x, None, found.epilogue, found.extras, Output())
        call = rw.replay(fused.overload, fused.call_args(), {}, [tensor_of(node)])
        rw.replace(node, rw.item(call, 0))
