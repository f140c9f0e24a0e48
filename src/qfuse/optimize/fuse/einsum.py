"""Spell an einsum of two quantized activations as a product of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.aten import aten
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import shape_of, tensor_of
from qfuse.ir.sizes import same_size, same_strides
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)

_OPERANDS = 2


@dataclass(frozen=True, slots=True)
class EinsumSite:
    """An einsum that is a product of matrices.

    Attributes:
        node: The einsum.
        operands: Its operands, each with the order of axes ``[*batch, rows, columns]``.
        order: The order of axes of the result, as axes of the product.
    """

    node: Node
    operands: tuple[tuple[Node, tuple[int, ...]], ...]
    order: tuple[int, ...]


class SpellEinsum(Rule[EinsumSite]):
    """``einsum("bqhd,bkhd->bhqk", dequantize(q), dequantize(k))`` becomes a ``matmul`` of permutes.

    Before::

        q -> dequantize --.
        k -> dequantize --+-> aten.einsum

    After::

        q -> dequantize -> permute --.
        k -> dequantize -> permute --+-> aten.matmul

    The dequantizes then sink below the permutes, which are views, and are fused into the product. A
    library may sum in another order.

    Refuses: a float operand; dots, repeated letters and sums of one operand; more or less than one
    letter that is summed, or that only one operand and the result have; a result whose strides
    would change.
    """

    name = "spell-einsum"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.einsum.default,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> EinsumSite | Miss:
        """Match a batched product of matrices, with axes in any order."""
        a = arguments(node)
        operands = a["tensors"]
        assert isinstance(operands, (list, tuple)), "operands are a list"
        nodes = [operand for operand in operands if isinstance(operand, Node)]
        if len(nodes) != _OPERANDS or any(as_dequantize(operand) is None for operand in nodes):
            text = "it does not multiply two quantized tensors"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        terms, arrow, result = str(a["equation"]).replace(" ", "").partition("->")
        each = terms.split(",") if arrow else []
        orders = _orders(each, result)
        # A result that lists the letter of the right operand first is the product of both swapped.
        if orders is not None and _inverse(orders[2])[-2:] != sorted(_inverse(orders[2])[-2:]):
            orders, nodes = _orders(each[::-1], result), nodes[::-1]
        if orders is None:
            text = "{} is not a product of matrices"
            return Miss(MissCode.PATTERN, node, text, a["equation"], progress=2)
        left, right, order = orders
        x, other = nodes
        if not same_size(shape_of(x)[left[-1]], shape_of(other)[right[-2]]):
            text = "an axis of one element is broadcast: {}, {}"
            details = tuple(shape_of(x)), tuple(shape_of(other))
            return Miss(MissCode.SHAPE, node, text, *details, progress=2)
        new = tensor_of(node).new_empty([tensor_of(node).shape[i] for i in _inverse(order)])
        if not same_strides(new.permute(order), tensor_of(node)):
            text = "the strides of the result would change from {}"
            return Miss(MissCode.SHAPE, node, text, tensor_of(node).stride(), progress=3)
        return EinsumSite(node, ((x, left), (other, right)), order)

    def rewrite(self, site: EinsumSite, rw: Rewriter) -> None:
        """Permute the operands, multiply, and permute the result."""
        operands = [_permuted(rw, operand, order) for operand, order in site.operands]
        product = rw.call(aten.matmul.default, *operands)
        rw.replace(site.node, _permuted(rw, product, site.order))


def _permuted(rw: Rewriter, value: Node, order: tuple[int, ...]) -> Node:
    if order == tuple(range(len(order))):
        return value
    return rw.call(aten.permute.default, value, list(order))


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


Orders = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _orders(terms: Sequence[str], result: str) -> Orders | None:
    """Return the orders of axes of both operands and of the result, or ``None``."""
    if len(terms) != _OPERANDS:
        return None
    x, other = terms
    if not all(term.isalpha() and len(set(term)) == len(term) for term in (x, other, result)):
        return None
    batch = [name for name in result if name in x and name in other]
    rows = [name for name in result if name in x and name not in other]
    columns = [name for name in result if name in other and name not in x]
    summed = [name for name in x if name in other and name not in result]
    if not len(rows) == len(columns) == len(summed) == 1:
        return None
    left, right = [*batch, *rows, *summed], [*batch, *summed, *columns]
    made = [*batch, *rows, *columns]
    if len(left) != len(x) or len(right) != len(other) or len(made) != len(result):
        return None
    return (
        tuple(x.index(name) for name in left),
        tuple(other.index(name) for name in right),
        tuple(made.index(name) for name in result),
    )
