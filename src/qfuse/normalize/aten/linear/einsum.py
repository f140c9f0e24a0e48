"""``einsum`` over the last axis of an activation and one axis of a weight is a linear."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from qfuse.ir.ops.views import node_of, shape_of
from qfuse.normalize.aten.linear.base import LinearFrom, ProductSite, spread_refusal
from qfuse.normalize.aten.linear.weights import is_weight
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, arguments

_PAIR = 2


class LinearFromEinsum(LinearFrom):
    """``einsum("bsk,nk->bsn", x, w)`` and its like become ``linear(x, w)``.

    Also ``kn``, the operands in the other order, and ``...`` for the leading axes.

    Rounding: ``einsum`` permutes and folds its operands into a batched product, which the library
    may sum in another order.

    Refuses: an equation that does more, such as a sum over another axis, a transposed result, a
    diagonal, or a weight of another rank than 2; an axis of one element that is spread over the
    other one; two operands that are computed at run time.
    """

    name = "linear-from-einsum"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.einsum.default,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> ProductSite | Miss:
        """Match an equation that says a linear."""
        a = arguments(node)
        operands = a["tensors"]
        assert isinstance(operands, (list, tuple)), "the schema says so"
        if len(operands) != _PAIR:
            return Miss(MissCode.PATTERN, node, "it has {} operands", len(operands), progress=0)
        equation = str(a["equation"]).replace(" ", "")
        inputs, _, result = equation.partition("->")
        terms = inputs.split(",")
        for x, weight in ((0, 1), (1, 0)):
            w = node_of(operands[weight])
            if not is_weight(w):
                continue
            activation = node_of(operands[x])
            layout = _layout(terms[x], terms[weight], result, len(shape_of(activation)))
            if layout is None:
                text = "{} is more than a product over the last axis"
                return Miss(MissCode.PATTERN, node, text, equation, progress=2)
            refusal = spread_refusal(node, activation, w, int(layout.rows))
            return refusal or ProductSite(node, activation, w, rows=layout.rows)
        return Miss(
            MissCode.NOT_CONSTANT, node, "both operands are computed at run time", progress=0
        )


class _Layout(NamedTuple):
    """Whether a row of the weight makes an output feature."""

    rows: bool


def _layout(x: str, weight: str, result: str, rank: int) -> _Layout | None:
    """Read the three terms; ``None`` if they are not those of a linear."""
    lead, k = x[:-1], x[-1:]
    features = weight.replace(k, "", 1) if k else ""
    if len(weight) != _PAIR or k not in weight or len(features) != 1 or features == k:
        return None
    letters = lead.replace("...", "")
    plain = letters.isalpha() or not letters
    if not plain or "." in k + features or len({*letters, k, features}) != len(letters) + _PAIR:
        return None
    if "..." not in lead and len(x) != rank:
        return None
    if result != lead + features:
        return None
    return _Layout(rows=weight[1] == k)
