"""Lift the transpose of a weight to the constant that the weight derives from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.normalize.aten.linear.weights import transposed
from qfuse.normalize.match.views import transpose_source
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule, aten


@dataclass(frozen=True, slots=True)
class WeightTranspose:
    """A transpose whose users are linears, as their weight, and its source."""

    node: Node
    source: Node


class LiftTranspose(Rule[WeightTranspose]):
    """``linear(x, t(dequantize(q)))`` becomes ``linear(x, dequantize(q_t))``.

    Before::

        const q [K, N] -> dequantize -> t -> linear

    After::

        const q_t [N, K] -> dequantize -> linear

    Exact: each element is computed as before. The new constants are views of the old ones.

    Refuses: a transpose with other users; a source that is neither a constant nor computed from one
    elementwise.
    """

    name = "lift-transpose"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> WeightTranspose | Miss:
        """Match the transposed weight of linears."""
        source = transpose_source(node)
        # A user that reads the transpose itself would keep both layouts of the weight.
        if source is None or not node.users or not all(_is_weight_of(node, u) for u in node.users):
            text = "it is not the transposed weight of linears"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        made = source
        while (wider := cast_source(made)) is not None:
            made = wider
        # Only for these can `transposed` move the transpose without moving data.
        if as_dequantize(made) is None and constant_of(made) is None:
            text = "it is not computed elementwise from a constant"
            return Miss(MissCode.PATTERN, made, text, progress=0)
        if not is_constant_expression(made):
            return Miss(MissCode.NOT_CONSTANT, made, "it is computed at run time")
        return WeightTranspose(node, source)

    def rewrite(self, site: WeightTranspose, rw: Rewriter) -> None:
        """Compute the weight from the transposed constant."""
        rw.replace(site.node, transposed(rw, site.source))


def _is_weight_of(node: Node, user: Node) -> bool:
    linear = as_linear(user)
    return linear is not None and linear.weight is node and linear.x is not node
