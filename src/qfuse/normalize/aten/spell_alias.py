"""Write every op that has several names by one of them."""

from __future__ import annotations

from typing import ClassVar

from qfuse.ir.graph.schema import overload_of
from qfuse.ir.ops.views import tensor_of
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

ALIASES: dict[OpOverload, OpOverload] = {
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.divide.Tensor: aten.div.Tensor,
    aten.divide.Tensor_mode: aten.div.Tensor_mode,
    aten.true_divide.Tensor: aten.div.Tensor,
    aten.subtract.Tensor: aten.sub.Tensor,
    aten.negative.default: aten.neg.default,
    aten.absolute.default: aten.abs.default,
    aten.fix.default: aten.trunc.default,
    aten.special_expit.default: aten.sigmoid.default,
    aten.special_round.default: aten.round.default,
    aten.special_softmax.default: aten.softmax.int,
    aten.max.other: aten.maximum.default,
    aten.min.other: aten.minimum.default,
    aten.linalg_matmul.default: aten.matmul.default,
    aten.row_stack.default: aten.vstack.default,
}
"""Other names of ops, which take the same arguments."""


class SpellAlias(Rule[Node]):
    """``multiply(x, y)`` becomes ``mul(x, y)``, and so do all ops with two names.

    Before::

        q -> cast -> multiply(scale)

    After::

        q -> cast -> mul(scale)

    Exact: torch implements one by calling the other.

    Refuses: ``special.round`` to decimals.
    """

    name = "spell-alias"
    anchors: ClassVar[tuple[OpOverload, ...]] = tuple(ALIASES)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> Node | Miss:
        """Match any of the names."""
        decimals = arguments(node).get("decimals", 0)
        if decimals != 0:
            text = "it rounds to {} decimals"
            return Miss(MissCode.ARGUMENT, node, text, decimals, progress=1)
        return node

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        """Call the op by its usual name."""
        op = overload_of(site)
        assert op is not None, "the anchors are ops"
        kwargs = {name: value for name, value in site.kwargs.items() if name != "decimals"}
        rw.replace(site, rw.replay(ALIASES[op], site.args, kwargs, tensor_of(site)))
