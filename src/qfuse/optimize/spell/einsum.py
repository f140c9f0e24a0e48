"""Spell an einsum of two quantized activations as a product of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import ClassVar, TypeAlias

import torch

from qfuse.ir.aten import aten
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import shape_of, tensor_of
from qfuse.ir.sizes import Size, same_size
from qfuse.optimize.match.float_side import refuse_float_side
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
_DOTS = "..."
_MATRIX = 2


Axes: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class EinsumSite:
    """An einsum that is a product of matrices.

    Attributes:
        node: The einsum.
        operands: Its operands, each with the order of axes ``[*batch, rows, columns]``; ``None`` is
            an axis that only the other one has, or the one row or column of a vector.
        order: The order of axes of the result, as axes of the product.
        one: The axis of the product that the result lacks: the one row or column of a vector.
    """

    node: Node
    operands: tuple[tuple[Node, Axes], ...]
    order: tuple[int, ...]
    one: int | None = None


class SpellEinsum(Rule[EinsumSite]):
    """``einsum("bqhd,bkhd->bhqk", dequantize(q), dequantize(k))`` becomes a ``matmul`` of permutes.

    Before::

        q -> dequantize --.
        k -> dequantize --+-> aten.einsum

    After::

        q -> dequantize -> permute --.
        k -> dequantize -> permute --+-> aten.matmul

    The dequantizes then sink below the permutes, which are views, and are fused into the product. A
    library may sum in another order. Of several letters that only one operand has, the innermost
    one of the result is that of the rows or columns. The others are batch axes along which the
    other operand is broadcast, as keys are to the queries of a group in ``"bhgqd,bhkd->bhgqk"``.

    Dots stand for as many letters. An operand without a letter of its own is one row or column for
    each entry of the batch, as tokens are to the weights of their experts in ``"tk,tnk->tn"``.

    Refuses: a float operand; repeated letters and sums of one operand; more or less than one letter
    that is summed; two operands without a letter of their own; a result whose strides are not those
    of a product.
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
            return _refuse_float(node, nodes)
        terms, arrow, result = str(a["equation"]).replace(" ", "").partition("->")
        each = terms.split(",") if arrow else []
        each, result = _without_dots(nodes, each, result)
        full, whole = _with_vector(each, result)
        if not _multiplies_matrices(full, whole):
            text = "{} is not a product of matrices"
            return Miss(MissCode.PATTERN, node, text, a["equation"], progress=2)
        value = tensor_of(node)
        made = _memory_order(value if whole == result else value.unsqueeze(0), full, whole)
        if made is None:
            text = "the strides {} of the result are not those of a product of matrices"
            return Miss(MissCode.SHAPE, node, text, value.stride(), progress=3)
        # The product of both swapped, if the letter of the right operand comes first.
        if made[-2] not in full[0]:
            each, nodes = each[::-1], nodes[::-1]
        (summed,) = (name for name in each[0] if name not in result)
        left, right = (*made[:-1], summed), (*made[:-2], summed, made[-1])
        x, other = nodes
        if not same_size(*(_size(*pair, summed) for pair in zip(nodes, each, strict=True))):
            text = "an axis of one element is broadcast: {}, {}"
            details = tuple(shape_of(x)), tuple(shape_of(other))
            return Miss(MissCode.SHAPE, node, text, *details, progress=2)
        operands = (x, _axes(left, each[0])), (other, _axes(right, each[1]))
        one = next((axis for axis, name in enumerate(made) if name not in result), None)
        kept = [name for name in made if name in result]
        return EinsumSite(node, operands, tuple(map(kept.index, result)), one)

    def rewrite(self, site: EinsumSite, rw: Rewriter) -> None:
        """Permute the operands, multiply, and permute the result."""
        operands = [_arranged(rw, operand, axes) for operand, axes in site.operands]
        product = rw.call(aten.matmul.default, *operands)
        if site.one is not None:
            product = rw.call(aten.squeeze.dim, product, site.one)
        rw.replace(site.node, _permuted(rw, product, site.order))


def _refuse_float(node: Node, operands: Sequence[Node]) -> Miss:
    known = [as_dequantize(operand) for operand in operands]
    if len(known) != _OPERANDS or not any(known):
        text = "it does not multiply two quantized tensors"
        return Miss(MissCode.PATTERN, node, text, progress=0)
    sides = "left", "right"
    (at,) = (index for index, quantized in enumerate(known) if quantized is None)
    return refuse_float_side(sides[at], operands[at], operands[1 - at])


def _arranged(rw: Rewriter, value: Node, axes: Axes) -> Node:
    """Permute the axes that there are, and add those along which the operand is broadcast."""
    value = _permuted(rw, value, tuple(axis for axis in axes if axis is not None))
    for axis, source in enumerate(axes):
        if source is None:
            value = rw.call(aten.unsqueeze.default, value, axis)
    return value


def _permuted(rw: Rewriter, value: Node, order: tuple[int, ...]) -> Node:
    if order == tuple(range(len(order))):
        return value
    return rw.call(aten.permute.default, value, list(order))


def _axes(order: Sequence[str], term: str) -> Axes:
    """Return the axes of an operand in an order of letters."""
    return tuple(term.index(name) if name in term else None for name in order)


def _size(operand: Node, term: str, name: str) -> Size:
    return shape_of(operand)[term.index(name)]


def _without_dots(
    operands: Sequence[Node], terms: Sequence[str], result: str
) -> tuple[list[str], str]:
    """Write letters for the axes that dots stand for; the last ones of each operand are shared."""
    fresh = "".join(name for name in ascii_letters if name not in "".join((*terms, result)))
    if len(terms) != len(operands) or not any(_DOTS in term for term in terms):
        return list(terms), result
    counts = [
        len(shape_of(operand)) - len(term) + len(_DOTS) if _DOTS in term else 0
        for operand, term in zip(operands, terms, strict=True)
    ]
    letters = fresh[: max(counts)]
    each = [
        term.replace(_DOTS, letters[len(letters) - count :])
        for term, count in zip(terms, counts, strict=True)
    ]
    return each, result.replace(_DOTS, letters)


def _with_vector(terms: Sequence[str], result: str) -> tuple[list[str], str]:
    """Give the operand that has no letter of its own one, of size 1, and the result too."""
    each = list(terms)
    if len(each) != _OPERANDS:
        return each, result
    vectors = [side for side, term in enumerate(each) if set(term) <= set(each[1 - side])]
    if len(vectors) != 1:
        return each, result
    letter = next(name for name in ascii_letters if name not in "".join((*each, result)))
    each[vectors[0]] += letter
    return each, letter + result


def _multiplies_matrices(terms: Sequence[str], result: str) -> bool:
    """Whether an equation sums one letter, and both operands have a letter of their own."""
    if len(terms) != _OPERANDS:
        return False
    x, other = map(set, terms)
    if not all(term.isalpha() and len(set(term)) == len(term) for term in (*terms, result)):
        return False
    kept = set(result)
    # Every letter of an operand is in the result, or summed with the other one.
    return (
        len((x & other) - kept) == 1
        and x ^ other <= kept <= x | other
        and bool(x - other)
        and bool(other - x)
    )


def _memory_order(value: torch.Tensor, terms: Sequence[str], result: str) -> str | None:
    """Return the letters of the result in the order of its strides, if it is dense.

    The last two are the letters of the rows and columns: each is one that only one operand has.
    Axes of size 1 may be anywhere.
    """
    own = [set(a) - set(b) for a, b in (terms, terms[::-1])]

    def fits(last: str) -> bool:
        """Whether each of the last letters is of another operand."""
        mine = [[name in names for names in own] for name in last]
        return all(map(any, mine)) and (len(last) < _MATRIX or mine[0] != mine[1])

    def extended(inner: str, step: Size) -> str | None:
        if len(inner) == len(result):
            return inner
        for axis, name in reversed(list(enumerate(result))):
            size, longer = value.shape[axis], name + inner
            if name in inner or not fits(longer[-_MATRIX:]):
                continue
            if same_size(size, 1) or same_size(value.stride(axis), step):
                found = extended(longer, step * size)
                if found is not None:
                    return found
        return None

    return extended("", 1)
