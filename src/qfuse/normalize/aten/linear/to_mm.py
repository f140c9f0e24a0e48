"""Turn a linear back into the ``mm`` or ``addmm`` that it was in the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.stage_graph import RULE_META, constant_of
from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.views import shape_of
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule, aten
from qfuse.rewrite.rewriter import origins

_PRODUCTS = frozenset((aten.mm.default, aten.addmm.default))
_MATRIX = 2


@dataclass(frozen=True, slots=True)
class SpellMmSite:
    """A linear that was a matrix product in the source."""

    linear: Linear


class SpellMm(Rule[SpellMmSite]):
    """``linear(x, w, b)`` that came from ``mm`` or ``addmm`` becomes that op again.

    Before::

        x, w, b -> linear

    After::

        w -> permute --+
        x -> reshape --+-> addmm(b) -> view

    A constant that is stored as ``[K, N]`` is transposed at compile time, without a ``permute``;
    reshape and view are added if ``x`` is not a matrix.

    Args:
        source: The op that each node of the source called, by the node's name.

    Refuses: a linear that was a linear in the source; an input without rows.
    """

    name = "spell-mm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.linear.default,)
    exactness = Exactness.EXACT

    def __init__(self, source: Mapping[str, OpOverload]) -> None:
        self._source = source

    def match(self, node: Node) -> SpellMmSite | Miss:
        """Match a linear that came from a matrix product."""
        linear = as_linear(node)
        assert linear is not None, "the anchor is a linear"
        called = {self._source[name] for name in origins(node) if name in self._source}
        own = RULE_META in node.meta and called & _PRODUCTS
        # A linear that several nodes became is one of the source if any of them was.
        if not own or aten.linear.default in called:
            text = "it was not mm or addmm in the source"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        if len(shape_of(linear.x)) < _MATRIX:
            return Miss(MissCode.SHAPE, linear.x, "its input has no rows", progress=2)
        return SpellMmSite(linear)

    def rewrite(self, site: SpellMmSite, rw: Rewriter) -> None:
        """Transpose the weight, and multiply matrices."""
        linear, x = site.linear, site.linear.x
        weight = _turned(linear.weight, rw)
        shape = shape_of(x)
        if len(shape) > _MATRIX:
            x = rw.call(aten.reshape.default, x, [-1, shape[-1]])
        if linear.bias is None:
            made = rw.call(aten.mm.default, x, weight)
        else:
            made = rw.call(aten.addmm.default, linear.bias, x, weight)
        if len(shape) > _MATRIX:
            rows = rw.sizes(linear.x, len(shape) - 1)
            made = rw.call(aten.view.default, made, [*rows, shape_of(made)[-1]])
        rw.replace(linear.node, made)


def _turned(weight: Node, rw: Rewriter) -> Node:
    value = constant_of(weight)
    # Only a constant that was stored as `[K, N]` gets its old layout back without a copy.
    if value is None or not value.t().is_contiguous():
        return rw.call(aten.permute.default, weight, [1, 0])
    return rw.constant(value.t(), str(weight.target))
