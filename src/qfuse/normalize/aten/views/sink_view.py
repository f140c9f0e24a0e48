"""Sink a view that merges rows before a linear below it, where another view splits them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.match.views import reapply_views, rows_source, view_source
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule, aten

# The most casts and linears between the two views.
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class SinkViewSite:
    """A linear or a cast, the view that is its operand, and that view's operand."""

    node: Node
    view: Node
    source: Node


class SinkView(Rule[SinkViewSite]):
    """``linear(view(x), w)`` becomes ``view(linear(x, w))``, where the view cancels.

    Before::

        x [B, S, K] -> view [B*S, K] -> linear -> view [B, S, N]

    After::

        x [B, S, K] -> linear -> view [B*S, N] -> view [B, S, N]

    The second view may split the last axis as well, as attention does for its heads. Casts and
    further linears between the linear and the second view are crossed after it.

    Rounding: a linear on more than two axes may round before it adds its bias.

    Refuses: a view that changes the last axis; a user that is not a view, since the view would come
    between the two; users none of which restores the leading axes of ``x``.
    """

    name = "sink-view"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.linear.default, aten._to_copy.default)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> SinkViewSite | Miss:
        """Match a linear or a cast of a view whose users are all views."""
        linear = as_linear(node)
        x = cast_source(node) if linear is None else linear.x
        source = rows_source(x)
        if x is None or source is None:
            text = "the input is not a view that leaves the last axis alone"
            return Miss(MissCode.PATTERN, x or node, text, progress=0)
        users = list(_users(node))
        for user in users:
            if view_source(user) is None:
                return Miss(MissCode.SHARED, user, "a user is not a view", progress=0)
        lead = shape_of(source)[:-1]
        # Without a view that restores the axes nothing cancels: one view would only change places.
        if not any(same_shape(shape_of(user)[: len(lead)], lead) for user in users):
            text = "no user restores the leading axes of the source"
            return Miss(MissCode.SHAPE, x, text, progress=0)
        return SinkViewSite(node, x, source)

    def rewrite(self, site: SinkViewSite, rw: Rewriter) -> None:
        """Apply the op to the source, and the view to its result."""
        linear = as_linear(site.node)
        if linear is not None:
            new = call_linear(rw, site.source, linear.weight, linear.bias)
        else:
            new = rw.call(aten._to_copy.default, site.source, dtype=dtype_of(site.node))
        rw.replace(site.node, reapply_views(rw, site.view, new))


def _users(node: Node, depth: int = _DEPTH) -> Iterator[Node]:
    """Yield the users of ``node``; for casts and linears, which views cross, their users."""
    for user in node.users:
        linear = as_linear(user)
        crosses = cast_source(user) is node if linear is None else linear.x is node
        if crosses and depth > 0:
            yield from _users(user, depth - 1)
        else:
            yield user
