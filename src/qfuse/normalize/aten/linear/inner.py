"""``inner`` and ``tensordot`` over one axis of a weight are linears."""

from __future__ import annotations

from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.views import node_of, shape_of
from qfuse.normalize.aten.linear.base import (
    LinearFrom,
    ProductSite,
    not_a_linear,
    spread_refusal,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, arguments, aten

_MATRIX = 2


class LinearFromInner(LinearFrom):
    """``inner(x, w)`` becomes ``linear(x, w)``; ``tensordot`` over x's last axis does too.

    Rounding: both reshape to a matrix product of their own, which the library may sum in another
    order.

    Refuses: a weight that is computed at run time or is not a matrix; a contraction of several
    axes, or of another axis of the activation than the last; an axis of one element that is spread
    over the other one.
    """

    name = "linear-from-inner"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.inner.default, aten.tensordot.default)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> ProductSite | Miss:
        """Match a contraction of the last axis of an activation with an axis of a weight."""
        a = arguments(node)
        x, weight = node_of(a["self"]), node_of(a["other"])
        refusal = not_a_linear(weight)
        if refusal is not None:
            return refusal
        if is_call(node, aten.inner.default):
            if not shape_of(x):
                return Miss(MissCode.SHAPE, x, "a scalar has no axis to contract", progress=0)
            return spread_refusal(node, x, weight, 1) or ProductSite(node, x, weight, rows=True)
        axes = (_only_axis(a["dims_self"], x), _only_axis(a["dims_other"], weight))
        if axes[0] != len(shape_of(x)) - 1 or axes[1] is None:
            text = "it contracts axes {} and {}, a linear the last one of its input"
            return Miss(MissCode.AXIS, node, text, a["dims_self"], a["dims_other"], progress=2)
        site = ProductSite(node, x, weight, rows=axes[1] == 1)
        return spread_refusal(node, x, weight, axes[1]) or site


def _only_axis(axes: object, tensor: Node) -> int | None:
    """Return the axis of a list of one, counted from the front."""
    if not isinstance(axes, (list, tuple)) or len(axes) != 1 or not isinstance(axes[0], int):
        return None
    return axes[0] % len(shape_of(tensor))
