"""Lift a view of a linear's rows above the linear, where it merges with another view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.view_ops import SIZED_VIEWS
from qfuse.ir.ops.views import shape_of
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.match.views import reapply_views, rows_source, view_source
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

_MATRIX = 2


@dataclass(frozen=True, slots=True)
class LiftViewSite:
    """A view, and the linear of a matrix whose only user it is."""

    view: Node
    linear: Linear


class LiftView(Rule[LiftViewSite]):
    """``view(linear(view(x), w))`` becomes ``linear(view(view(x)), w)``, where two views are one.

    Before::

        x [B, S, H, D] -> view [B*S, H*D] -> linear -> view [B, S, N]

    After::

        x [B, S, H, D] -> view [B*S, H*D] -> view [B, S, H*D] -> linear

    The users of the view then use the linear directly. ``sink-view`` goes the other way, where it
    is the first view that cancels.

    Rounding: a linear on more than two axes may round before it adds its bias.

    Refuses: a view that changes the last axis; a linear with other users; a linear whose input is
    not a view, so that nothing would be saved, or not a matrix, so that the view may not exist.
    """

    name = "lift-view"
    anchors: ClassVar[tuple[OpOverload, ...]] = SIZED_VIEWS
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> LiftViewSite | Miss:
        """Match a view of rows of a linear of a view."""
        linear = as_linear(arguments(node)["self"])
        if linear is None or rows_source(node) is None:
            text = "it is not a view of the rows of a linear"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        # Without a view above, the lifted one merges with nothing. Only a matrix has rows that a
        # view can split for any strides.
        if view_source(linear.x) is None or len(shape_of(linear.x)) != _MATRIX:
            text = "the input of the linear is not a matrix that is a view"
            return Miss(MissCode.PATTERN, linear.x, text, progress=0)
        # Another user would need the linear in its old shape: a second matrix product, or a view
        # back.
        if len(linear.node.users) > 1:
            return Miss(MissCode.SHARED, linear.node, "the linear has other users", progress=0)
        return LiftViewSite(node, linear)

    def rewrite(self, site: LiftViewSite, rw: Rewriter) -> None:
        """View the input, and apply the linear to the view."""
        linear = site.linear
        x = reapply_views(rw, site.view, linear.x)
        rw.replace(site.view, call_linear(rw, x, linear.weight, linear.bias, like=site.view))
