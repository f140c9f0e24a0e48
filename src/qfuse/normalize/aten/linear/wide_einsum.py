"""Spell an einsum with a weight of several feature axes as a linear."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from string import ascii_letters
from typing import ClassVar

from qfuse.ir.ops.views import dtype_of, shape_of, tensor_of
from qfuse.ir.sizes import inverse, is_row_major, same_shape
from qfuse.normalize.aten.linear.einsums import no_weight, weighted_einsum
from qfuse.normalize.aten.linear.weights import call_linear
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

_MATRIX = 2
_DOTS = "..."


@dataclass(frozen=True, slots=True)
class WideEinsumSite:
    """An einsum that is a linear between views.

    Attributes:
        node: The einsum.
        x: The activation.
        turn: The order of its axes in which those that are summed are last.
        weight: The weight.
        order: Its axes: the features in the order of the result, then the summed axes in the order
            of the activation.
        summed: How many axes are summed.
        back: The order of the axes of the result, as axes of the linear's result.
    """

    node: Node
    x: Node
    turn: tuple[int, ...]
    weight: Node
    order: tuple[int, ...]
    summed: int
    back: tuple[int, ...]


class SpellWideEinsum(Rule[WideEinsumSite]):
    """``einsum("btm,hdm->bthd", x, w)`` becomes a linear with ``h * d`` features.

    Before::

        x, const w [h, d, m] -> einsum

    After::

        const w -> reshape [h * d, m] --+
        x ------------------------------+-> linear -> view [b, t, h, d]

    So do projections of heads, with several axes summed in ``"bthd,hdm->btm"``, and the products of
    all experts in ``"tk,enk->ten"``. The axes of the weight may be in any order, and so may be
    those of the result, if its memory has those of the activation first. An activation whose summed
    axes are not the last ones is permuted, as in ``"bhtd,hdm->btm"``.

    Rounding: a library may sum in another order.

    Refuses: a weight that is computed at run time; a matrix and the last axis of the activation,
    which other rules spell; results whose strides are not those of a linear.
    """

    name = "spell-wide-einsum"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.einsum.default,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> WideEinsumSite | Miss:
        """Match an einsum of an activation and a weight."""
        read = weighted_einsum(node)
        if read is None or read.result is None:
            return no_weight(node)
        x, weight = read.x, read.weight
        found = _orders(read.of_x, read.of_weight, read.result, len(shape_of(x)))
        if found is None or not dtype_of(weight).is_floating_point:
            text = "{} is not a product of matrices"
            return Miss(MissCode.PATTERN, node, text, arguments(node)["equation"], progress=1)
        turn, order, summed, back = found
        if len(order) == _MATRIX and turn == tuple(range(len(turn))):
            return Miss(MissCode.PATTERN, node, "its weight is a matrix", progress=0)
        sizes = shape_of(weight)
        ends = [sizes[axis] for axis in order[-summed:]]
        if not same_shape([shape_of(x)[axis] for axis in turn[-summed:]], ends):
            text = "an axis of one element is broadcast: {}, {}"
            details = tuple(shape_of(x)), tuple(sizes)
            return Miss(MissCode.SHAPE, node, text, *details, progress=2)
        if not is_row_major(tensor_of(node).permute(inverse(back))):
            text = "the strides {} of the result are not those of a linear"
            return Miss(MissCode.SHAPE, node, text, tensor_of(node).stride(), progress=2)
        return WideEinsumSite(node, x, turn, weight, order, summed, back)

    def rewrite(self, site: WideEinsumSite, rw: Rewriter) -> None:
        """View both operands as matrices, and the result with its axes."""
        sizes = [int(size) for size in shape_of(site.weight)]
        ordered = [sizes[axis] for axis in site.order]
        weight = site.weight
        if site.order != tuple(range(len(sizes))):
            weight = rw.call(aten.permute.default, weight, list(site.order))
        k = prod(ordered[-site.summed :])
        matrix = [prod(ordered[: -site.summed]), k]
        if ordered != matrix:
            weight = rw.call(aten.reshape.default, weight, matrix)
        x = site.x
        if site.turn != tuple(range(len(site.turn))):
            x = rw.call(aten.permute.default, x, list(site.turn))
        lead = rw.sizes(x, len(site.turn) - site.summed)
        if site.summed > 1:
            x = rw.call(aten.reshape.default, x, [*lead, k])
        y = call_linear(rw, x, weight)
        features = ordered[: -site.summed]
        if len(features) != 1:
            y = rw.call(aten.view.default, y, [*lead, *features])
        if site.back != tuple(range(len(site.back))):
            y = rw.call(aten.permute.default, y, list(site.back))
        rw.replace(site.node, y)


def _orders(
    x: str, weight: str, result: str, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]] | None:
    """Return the orders of the axes of both operands, how many are summed, and the result's."""
    if _DOTS in x and x.startswith(_DOTS) and result.startswith(_DOTS):
        fresh = [name for name in ascii_letters if name not in x + weight]
        dots = "".join(fresh[: rank - len(x) + len(_DOTS)])
        x, result = x.replace(_DOTS, dots), result.replace(_DOTS, dots)
    if not (x + weight + result).isalpha() or any(len(set(t)) != len(t) for t in (x, weight)):
        return None
    ends = [name for name in x if name in weight]
    lead = [name for name in x if name not in weight]
    features = [name for name in result if name in weight]
    memory = [*lead, *features]
    whole = sorted(memory) == sorted(result) and sorted((*features, *ends)) == sorted(weight)
    if not ends or not features or not whole:
        return None
    turn = tuple(x.index(name) for name in (*lead, *ends))
    order = tuple(weight.index(name) for name in (*features, *ends))
    return turn, order, len(ends), tuple(map(memory.index, result))
