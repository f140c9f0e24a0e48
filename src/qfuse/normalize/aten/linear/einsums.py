"""Einsums of an activation and a constant weight."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.ops.constants import is_constant_expression
from qfuse.rewrite.prelude import Miss, MissCode, Node, arguments

_OPERANDS = 2


@dataclass(frozen=True, slots=True)
class WeightedEinsum:
    """The operands of an einsum, and its equation.

    Attributes:
        x: The activation.
        weight: The weight.
        of_x: The term of the activation.
        of_weight: The term of the weight.
        result: The term of the result; ``None`` if the equation has none.
    """

    x: Node
    weight: Node
    of_x: str
    of_weight: str
    result: str | None


def weighted_einsum(node: Node) -> WeightedEinsum | None:
    """View an einsum of two operands, one of which is a constant, as that of a weight."""
    a = arguments(node)
    operands = a["tensors"]
    assert isinstance(operands, (list, tuple)), "operands are a list"
    nodes = [operand for operand in operands if isinstance(operand, Node)]
    weights = [is_constant_expression(operand) for operand in nodes]
    terms, arrow, result = str(a["equation"]).replace(" ", "").partition("->")
    each = terms.split(",")
    if len(nodes) != _OPERANDS or sum(weights) != 1 or len(each) != _OPERANDS:
        return None
    at = weights.index(True)
    named = result if arrow else None
    return WeightedEinsum(nodes[1 - at], nodes[at], each[1 - at], each[at], named)


def no_weight(node: Node) -> Miss:
    """Refuse an einsum of other operands."""
    text = "it does not multiply an activation and a weight"
    return Miss(MissCode.PATTERN, node, text, progress=0)
