"""Fuse an addition into the epilogue of a fused product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.epilogue import Add, Mul
from qfuse.ir.ops.product import FusedProduct, kind_of
from qfuse.optimize.fuse.epilogue import append_op, extended, open_product
from qfuse.optimize.fuse.epilogue_operand import EpilogueOperand, minus_one, operand_of
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
class AddSite:
    """A fused op, the sum that is its only user, and the other summand.

    Attributes:
        fused: The fused op.
        node: The sum.
        other: The other summand.
        alpha: The factor of the other summand.
        negated: Whether the op is subtracted.
    """

    fused: FusedProduct
    node: Node
    other: EpilogueOperand
    alpha: float
    negated: bool


class FuseAdd(Rule[AddSite]):
    """``qfuse.linear(...) + alpha * other`` becomes one op with ``other`` as epilogue operand.

    The same for ``qfuse.convolution`` and ``qfuse.matmul``, and for differences, where ``alpha`` is
    negative; an op that is subtracted is multiplied by -1 first. A summand that is a dequantize
    with one constant scale is read as it is stored.

    Refuses: an op that is added to itself; another ``alpha`` on the op's side; integer summands;
    numbers that a narrow float dtype rounds; a summand of another shape, except for one value per
    channel or feature, and for a matmul any that broadcasts to the result; a sum whose memory order
    is that of the other summand.
    """

    name = "fuse-add"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.add.Tensor, aten.sub.Tensor)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> AddSite | Miss:
        """Match a sum of an open fused op and a float tensor."""
        a = arguments(node)
        left, right, alpha = a["self"], a["other"], a["alpha"]
        if not isinstance(alpha, (int, float)):
            return Miss(MissCode.ARGUMENT, node, "alpha is not a number")
        scale = -float(alpha) if is_call(node, aten.sub.Tensor) else float(alpha)
        first = self._match_side(node, left, right, (1.0, scale))
        if not isinstance(first, Miss):
            return first
        second = self._match_side(node, right, left, (scale, 1.0))
        if not isinstance(second, Miss):
            return second
        return max(first, second, key=lambda miss: miss.progress)

    def _match_side(
        self, node: Node, product: object, other: object, factors: tuple[float, float]
    ) -> AddSite | Miss:
        """Match a sum of ``product`` and ``other``, each times its factor."""
        fused = open_product(product, node)
        if isinstance(fused, Miss):
            return fused
        operand = operand_of(node, fused, other, "summand")
        if isinstance(operand, Miss):
            return operand
        if abs(factors[0]) != 1:
            text = "the {} is multiplied by {} before the addition"
            return Miss(MissCode.ARGUMENT, node, text, kind_of(fused), factors[0], progress=3)
        return AddSite(fused, node, operand, factors[1], negated=factors[0] < 0)

    def rewrite(self, site: AddSite, rw: Rewriter) -> None:
        """Replace the sum by the extended op."""
        fused = site.fused
        if site.negated:
            fused = extended(fused, Mul(len(fused.extras)), minus_one(fused).extras(rw))
        at = len(fused.extras)
        step = Add(at, site.alpha, site.other.stored(at))
        append_op(fused, site.node, step, rw, site.other.extras(rw))
