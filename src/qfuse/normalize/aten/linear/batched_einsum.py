"""Spell an einsum of a batch of activations and a batch of weights as ``bmm``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.ops.views import dtype_of, shape_of, tensor_of
from qfuse.ir.sizes import Size, inverse, is_row_major, same_size
from qfuse.normalize.aten.linear.einsums import no_weight, weighted_einsum
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

_AXES = 3
_IN_ORDER = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class BatchedEinsumSite:
    """An einsum that multiplies each entry of a batch with its own weight.

    Attributes:
        node: The einsum.
        x: The activation.
        weight: The weights.
        turn: The axes of the activation as batch, rows, summed axis.
        order: The axes of the weights as batch, summed axis, features.
        back: The axes of the result, as axes of batch, rows and features.
    """

    node: Node
    x: Node
    weight: Node
    turn: tuple[int, ...]
    order: tuple[int, ...]
    back: tuple[int, ...]


class SpellBatchedEinsum(Rule[BatchedEinsumSite]):
    """``einsum("ebk,enk->ebn", x, w)`` with constant weights becomes ``bmm(x, w.mT)``.

    Before::

        x, const w [e, n, k] -> einsum

    After::

        const w -> permute [e, k, n] --+
        x -----------------------------+-> bmm

    The weights of experts are then read as those of any ``bmm``. The axes of both operands may be
    in any order, and those of the result, if its memory has batch, rows and features in this order.

    Rounding: a library may sum in another order.

    Refuses: weights that are computed at run time; other numbers of axes; an axis of one element
    that is broadcast; results whose strides are not those of ``bmm``.
    """

    name = "spell-batched-einsum"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.einsum.default,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> BatchedEinsumSite | Miss:
        """Match an einsum of three letters in each term."""
        read = weighted_einsum(node)
        if read is None:
            return no_weight(node)
        x, weight, result = read.x, read.weight, read.result or ""
        letters = _letters(read.of_x, read.of_weight, result)
        if letters is None or not dtype_of(weight).is_floating_point:
            text = "{} does not multiply each entry of a batch with a weight of its own"
            return Miss(MissCode.PATTERN, node, text, arguments(node)["equation"], progress=1)
        batch, rows, summed, features = letters
        for name in (batch, summed):
            if not same_size(_size(x, read.of_x, name), _size(weight, read.of_weight, name)):
                text = "an axis of one element is broadcast: {}, {}"
                details = tuple(shape_of(x)), tuple(shape_of(weight))
                return Miss(MissCode.SHAPE, node, text, *details, progress=2)
        turn = tuple(map(read.of_x.index, (batch, rows, summed)))
        order = tuple(map(read.of_weight.index, (batch, summed, features)))
        back = tuple(map((batch, rows, features).index, result))
        if not is_row_major(tensor_of(node).permute(inverse(back))):
            text = "the strides {} of the result are not those of bmm"
            return Miss(MissCode.SHAPE, node, text, tensor_of(node).stride(), progress=2)
        return BatchedEinsumSite(node, x, weight, turn, order, back)

    def rewrite(self, site: BatchedEinsumSite, rw: Rewriter) -> None:
        """Permute the operands, multiply, and permute the result."""
        x = _permuted(rw, site.x, site.turn)
        weight = _permuted(rw, site.weight, site.order)
        y = rw.call(aten.bmm.default, x, weight)
        rw.replace(site.node, _permuted(rw, y, site.back))


def _letters(x: str, weight: str, result: str) -> tuple[str, str, str, str] | None:
    """Return the letters of the batch, the rows, the summed axis and the features."""
    terms = [set(term) for term in (x, weight, result)]
    plain = all(term.isalpha() and len(term) == _AXES for term in (x, weight, result))
    if not plain or any(len(term) != _AXES for term in terms):
        return None
    of_x, of_weight, kept = terms
    parts = (
        of_x & of_weight & kept,
        (of_x - of_weight) & kept,
        (of_x & of_weight) - kept,
        (of_weight - of_x) & kept,
    )
    if any(len(part) != 1 for part in parts):
        return None
    batch, rows, summed, features = (min(part) for part in parts)
    return batch, rows, summed, features


def _size(operand: Node, term: str, name: str) -> Size:
    return shape_of(operand)[term.index(name)]


def _permuted(rw: Rewriter, value: Node, order: tuple[int, ...]) -> Node:
    return value if order == _IN_ORDER else rw.call(aten.permute.default, value, list(order))
