"""A view that merges rows before a linear, and splits them after it, goes below the linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.views import Linear, as_linear, shape_of
from qfuse.normalize.movement import put_back, rows_source, view_source
from qfuse.normalize.sizes import same_shape
from qfuse.normalize.weights import call_linear
from qfuse.rewrite.rule import Miss, Rule

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.fx import Node

    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["SinkView", "SinkViewSite"]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SinkViewSite:
    """A linear, the view that it reads, and what that is a view of."""

    linear: Linear
    view: Node
    source: Node


class SinkView(Rule[SinkViewSite]):
    """``linear(view(x), w)`` becomes ``view(linear(x, w))``, where the view cancels.

    Before::

        x [B, S, K] -> view [B*S, K] -> linear -> view [B, S, N]

    After::

        x [B, S, K] -> linear -> view [B*S, N] -> view [B, S, N]

    Rounding: a linear on more than two axes may round before it adds its bias.

    Refuses: a view that changes the last axis; a linear with a reader that is not a view, since
    the view would come between the two; one of whose readers none goes back to the shape of ``x``.
    """

    name = "sink-view"
    anchors: ClassVar[tuple[OpOverload, ...]] = (_aten.linear.default,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> SinkViewSite | Miss:
        """Match a linear of a view that all readers view again."""
        linear = as_linear(node)
        assert linear is not None, "the anchor is a linear"
        source = rows_source(linear.x)
        if source is None:
            text = "the input is not a view that leaves the last axis alone"
            return Miss(MissCode.PATTERN, linear.x, text, progress=0)
        for user in node.users:
            if view_source(user) is None:
                return Miss(MissCode.SHARED, user, "a reader is not a view", progress=0)
        lead = shape_of(source)[:-1]
        if not any(same_shape(shape_of(user)[:-1], lead) for user in node.users):
            text = "no reader goes back to the shape of the source"
            return Miss(MissCode.SHAPE, linear.x, text, progress=0)
        return SinkViewSite(linear, linear.x, source)

    def rewrite(self, site: SinkViewSite, rw: Rewriter) -> None:
        """Apply the linear to the source, and the view to its result."""
        linear = site.linear
        new = call_linear(rw, site.source, linear.weight, linear.bias)
        rw.replace(linear.node, put_back(rw, site.view, new))
