"""Fuse a residual addition into the epilogue of a fused linear or convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.ops.epilogue import Add
from qfuse.ir.ops.product import FusedProduct, kind_of
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.optimize.fuse.epilogue import append_step, open_product, refuse_strides
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


@dataclass(frozen=True, slots=True)
class AddSite:
    """A fused op, the sum that is its only user, and the other summand."""

    fused: FusedProduct
    node: Node
    other: Node
    alpha: float


class FuseAdd(Rule[AddSite]):
    """``qfuse.linear(...) + alpha * other`` becomes one op with ``other`` as epilogue operand.

    The same for ``qfuse.convolution``.

    Refuses: a summand that is not a tensor; an op that is added to itself; ``alpha`` on the op's
    side; a summand that would broadcast the op's result to a larger shape; a summand of another
    shape than the op, since a residual has the same shape; integer summands; a sum whose memory
    order is that of the other summand.
    """

    name = "fuse-add"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.add.Tensor,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> AddSite | Miss:
        """Match a sum of an open fused op and a float tensor of its shape."""
        a = arguments(node)
        left, right, alpha = a["self"], a["other"], a["alpha"]
        if not isinstance(alpha, (int, float)):
            return Miss(MissCode.ARGUMENT, node, "alpha is not a number", progress=1)
        first = self._match_side(node, left, right, float(alpha), scaled=False)
        if not isinstance(first, Miss):
            return first
        second = self._match_side(node, right, left, float(alpha), scaled=True)
        if not isinstance(second, Miss):
            return second
        return max(first, second, key=lambda miss: miss.progress)

    def _match_side(
        self, node: Node, product: object, other: object, alpha: float, *, scaled: bool
    ) -> AddSite | Miss:
        fused = open_product(product, node)
        if isinstance(fused, Miss):
            return fused
        found = _refuse(node, fused, other, alpha if scaled else 1.0)
        if isinstance(found, Miss):
            return found
        return AddSite(fused, node, found, 1.0 if scaled else alpha)

    def rewrite(self, site: AddSite, rw: Rewriter) -> None:
        """Replace the sum by the extended op."""
        step = Add(len(site.fused.extras), site.alpha)
        append_step(site.fused, site.node, step, rw, (site.other,))


def _refuse(node: Node, fused: FusedProduct, other: object, own_alpha: float) -> Node | Miss:
    """Return the other summand if it is a residual, or the reason why it is not."""
    kind = kind_of(fused)
    if not isinstance(other, Node) or not isinstance(other.meta["val"], torch.Tensor):
        return Miss(MissCode.ARGUMENT, node, "the other summand is a number", progress=3)
    if other is fused.node:
        return Miss(MissCode.SHARED, node, "the {} is added to itself", kind, progress=3)
    if own_alpha != 1.0:
        text = "alpha={} scales the {}, not the other summand"
        return Miss(MissCode.ARGUMENT, node, text, own_alpha, kind, progress=3)
    if not dtype_of(other).is_floating_point:
        text = "the other summand is {}"
        return Miss(MissCode.DTYPE, other, text, dtype_of(other), progress=3)
    shape, mine = tuple(shape_of(other)), tuple(shape_of(fused.node))
    if not same_shape(shape, mine):
        text = "a summand of shape {} is not a residual of shape {}"
        return Miss(MissCode.SHAPE, other, text, shape, mine, progress=3)
    return refuse_strides(fused, node) or other
