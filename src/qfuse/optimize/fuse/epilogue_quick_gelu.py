"""Fuse a quick GELU into the epilogue of a fused product."""

from __future__ import annotations

import math

from qfuse.ir.ops.epilogue import Act
from qfuse.ir.ops.product import FusedProduct, as_fused_product
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.optimize.fuse.epilogue import append_op, open_product
from qfuse.patterns.written_out import FACTOR, QUICK_GELU
from qfuse.rewrite.pattern import Capture, Match, PatternRule, check, guard, let
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter

FUSED = Capture[FusedProduct]("fused")


@guard(MissCode.PATTERN, "the operand is not a quantized product", at="x")
def _is_product(x: Node) -> bool:
    return as_fused_product(x) is not None


@guard(MissCode.ARGUMENT, "the factor {factor} is not finite")
def _is_finite(factor: float) -> bool:
    return math.isfinite(factor)


@guard(MissCode.DTYPE, "the factor changes the dtype or shape of the activation")
def _keeps_type(node: Node, x: Node) -> bool:
    return dtype_of(node) == dtype_of(x) and same_shape(shape_of(node), shape_of(x))


def _refuse_shared(gate: Node) -> Miss | None:
    """Refuse values between the product and the result that have other users."""
    (scaled,) = gate.all_input_nodes
    for each in (gate, scaled):
        if len(each.users) > 1:
            return Miss(MissCode.SHARED, each, "a part of the activation has other users")
    return None


def _open(x: Node, gate: Node, node: Node) -> FusedProduct | Miss:
    (scaled,) = gate.all_input_nodes
    return open_product(x, node, scaled)


class FuseQuickGelu(PatternRule):
    """``y * sigmoid(1.702 * y)`` of a fused op ``y`` becomes its ``act(quick_gelu,1.702)``.

    Before::

        qfuse.linear -+-> mul(1.702) -> sigmoid -> mul -> user
                      '--------------------------^

    After::

        qfuse.linear -> user

    Rounding: the steps in between are not rounded to the dtype of ``y``.

    Refuses: a product or a step in between with other users; a factor that is not one finite
    number, or that changes the dtype.
    """

    name = "fuse-quick-gelu"
    exactness = Exactness.ROUNDING
    pattern = (
        QUICK_GELU.given(_is_product)
        .core()
        .given(_is_finite, _keeps_type, check(_refuse_shared), let(FUSED, _open))
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Replace the product with the sigmoid by the extended op."""
        append_op(site[FUSED], site.node, Act("quick_gelu", (float(site[FACTOR]),)), rw)
