"""A linear as the ``mm`` or ``addmm`` that it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.program import constant_of
from qfuse.ir.views import Linear, as_linear, shape_of
from qfuse.rewrite.rewriter import RULE_META, origins
from qfuse.rewrite.rule import Miss, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._ops import OpOverload
    from torch.fx import Node

    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["SpellMm", "SpellMmSite"]

_aten = torch.ops.aten
_PRODUCTS = frozenset((_aten.mm.default, _aten.addmm.default))
_MATRIX = 2


@dataclass(frozen=True, slots=True)
class SpellMmSite:
    """A linear that was a product of matrices."""

    linear: Linear


class SpellMm(Rule[SpellMmSite]):
    """``linear(x, w, b)`` that was made of ``mm`` and ``addmm`` becomes one of them again.

    Before::

        x, w, b -> linear

    After::

        w -> permute --+
        x -> reshape --+-> addmm(b) -> view

    A constant that lies in memory as ``[K, N]`` is turned ahead, without a ``permute``; reshape and
    view are there if ``x`` is no matrix.

    Args:
        source: What each node of the source called, by its name.

    Refuses: a linear that the source wrote as one; an input without rows.
    """

    name = "spell-mm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (_aten.linear.default,)
    exactness = Exactness.EXACT

    def __init__(self, source: Mapping[str, OpOverload]) -> None:
        self._source = source

    def match(self, node: Node) -> SpellMmSite | Miss:
        """Match a linear that a rule made of products of matrices."""
        linear = as_linear(node)
        assert linear is not None, "the anchor is a linear"
        called = {self._source[name] for name in origins(node) if name in self._source}
        own = RULE_META in node.meta and called & _PRODUCTS
        if not own or _aten.linear.default in called:
            text = "the source did not write it as mm or addmm"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        if len(shape_of(linear.x)) < _MATRIX:
            return Miss(MissCode.SHAPE, linear.x, "its input has no rows", progress=2)
        return SpellMmSite(linear)

    def rewrite(self, site: SpellMmSite, rw: Rewriter) -> None:
        """Turn the weight, and multiply matrices."""
        linear, x = site.linear, site.linear.x
        weight = _turned(linear.weight, rw)
        shape = shape_of(x)
        if len(shape) > _MATRIX:
            x = rw.call(_aten.reshape.default, x, [-1, shape[-1]])
        if linear.bias is None:
            made = rw.call(_aten.mm.default, x, weight)
        else:
            made = rw.call(_aten.addmm.default, linear.bias, x, weight)
        if len(shape) > _MATRIX:
            rows = rw.sizes(linear.x, len(shape) - 1)
            made = rw.call(_aten.view.default, made, [*rows, shape_of(made)[-1]])
        rw.replace(linear.node, made)


def _turned(weight: Node, rw: Rewriter) -> Node:
    value = constant_of(weight)
    if value is None or not value.t().is_contiguous():
        return rw.call(_aten.permute.default, weight, [1, 0])
    return rw.constant(value.t(), str(weight.target))
