"""Merge a view of a view into one view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.view_ops import SIZED_VIEWS
from qfuse.ir.ops.views import node_of
from qfuse.normalize.match.views import sizes_argument, view_source
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


@dataclass(frozen=True, slots=True)
class ViewPair:
    """A view, and the operand of the view that is its operand."""

    node: Node
    source: Node
    copies: bool


class MergeViews(Rule[ViewPair]):
    """``view(view(x))`` becomes ``view(x)``, whatever kind of view the inner one is.

    If the inner view is a ``reshape``, which may copy, the result is a ``reshape`` too.

    Refuses: a view of anything else.
    """

    name = "merge-views"
    anchors: ClassVar[tuple[OpOverload, ...]] = SIZED_VIEWS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ViewPair | Miss:
        """Match a view of a view."""
        inner = node_of(arguments(node)["self"])
        source = view_source(inner)
        if source is None:
            return Miss(MissCode.PATTERN, inner, "it is not a view of a view", progress=0)
        # `view` raises where the strides do not allow it; `reshape` copies there.
        copies = is_call(inner, aten.reshape.default) or is_call(node, aten.reshape.default)
        return ViewPair(node, source, copies)

    def rewrite(self, site: ViewPair, rw: Rewriter) -> None:
        """View the source in the outer shape."""
        op = aten.reshape.default if site.copies else aten.view.default
        rw.replace(site.node, rw.call(op, site.source, list(sizes_argument(site.node))))
