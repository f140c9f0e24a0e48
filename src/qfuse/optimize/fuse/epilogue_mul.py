"""Fuse a multiplication into the epilogue of a fused product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.epilogue import Mul
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.product import FusedProduct
from qfuse.optimize.fuse.epilogue import append_op, open_product
from qfuse.optimize.fuse.epilogue_operand import EpilogueOperand, operand_of
from qfuse.patterns.activations import ACTIVATION_OPS
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)


@dataclass(frozen=True, slots=True)
class MulSite:
    """A fused op, the product that is its only user, and the other factor."""

    fused: FusedProduct
    node: Node
    other: EpilogueOperand


class FuseMul(Rule[MulSite]):
    """``qfuse.convolution(...) * other`` becomes one op with ``other`` as epilogue operand.

    The same for ``qfuse.linear`` and ``qfuse.matmul``. A factor that is a dequantize with one
    constant scale is read as it is stored. A quotient by a power of two is the product with its
    reciprocal, which is exact.

    Refuses: the product of a linear and an activation that is not in a linear's epilogue, which are
    one op with the following quantize; an op that is multiplied by itself; integer factors; numbers
    that a narrow float dtype rounds; other divisors; a factor of another shape, except for one
    value per channel or feature, and for a matmul any that broadcasts to the result; a product
    whose memory order is that of the other factor.
    """

    name = "fuse-mul"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.mul.Tensor, aten.div.Tensor)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> MulSite | Miss:
        """Match a product of an open fused op and a float tensor."""
        a = arguments(node)
        if is_call(node, aten.div.Tensor):
            factor = _reciprocal(node, a["other"])
            if isinstance(factor, Miss):
                # The divisor matters only if the quotient is one of a fused op.
                product = open_product(a["self"], node)
                return product if isinstance(product, Miss) else factor
            return self._match_side(node, a["self"], factor)
        first = self._match_side(node, a["self"], a["other"])
        if not isinstance(first, Miss):
            return first
        second = self._match_side(node, a["other"], a["self"])
        if not isinstance(second, Miss):
            return second
        return max(first, second, key=lambda miss: miss.progress)

    def _match_side(self, node: Node, product: object, other: object) -> MulSite | Miss:
        fused = open_product(product, node)
        if isinstance(fused, Miss):
            return fused
        operand = _refuse_gate(fused, other) or operand_of(node, fused, other, "factor")
        return operand if isinstance(operand, Miss) else MulSite(fused, node, operand)

    def rewrite(self, site: MulSite, rw: Rewriter) -> None:
        """Replace the product by the extended op."""
        at = len(site.fused.extras)
        step = Mul(at, stored=site.other.stored(at))
        append_op(site.fused, site.node, step, rw, site.other.extras(rw))


def _reciprocal(node: Node, divisor: object) -> float | Miss:
    """Return the reciprocal of a power of two."""
    if not isinstance(divisor, (int, float)) or isinstance(divisor, bool):
        return Miss(MissCode.ARGUMENT, node, "the divisor is not a number", progress=0)
    # In float32 as well, and far from the ends of its range.
    if abs(math.frexp(divisor)[0]) != 0.5 or not 2.0**-64 <= abs(divisor) <= 2.0**64:  # noqa: PLR2004
        text = "it is divided by {}, whose reciprocal is rounded"
        return Miss(MissCode.ARGUMENT, node, text, divisor, progress=1)
    return 1.0 / divisor


def _refuse_gate(fused: FusedProduct, other: object) -> Miss | None:
    """Leave the product with an activation to the rules of gated activations."""
    if not isinstance(other, Node) or not is_call(other, *ACTIVATION_OPS):
        return None
    if not isinstance(fused, FusedLinear) or len(other.users) > 1:
        return None
    text = "the other factor is an activation, which is fused with the product instead"
    return Miss(MissCode.ORDER, other, text, progress=3)
