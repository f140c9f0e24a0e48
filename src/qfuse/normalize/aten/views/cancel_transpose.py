"""Cancel a transpose of a transpose, with copies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.views import node_of
from qfuse.normalize.match.views import transpose_source
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
class TransposePair:
    """A transpose, and the matrix that it restores."""

    node: Node
    source: Node


class CancelTranspose(Rule[TransposePair]):
    """``t(t(w))`` becomes ``w``; so does ``t(clone(t(w)))``, since the copy changes no value.

    Refuses: a transpose of anything else; a copy that keeps a graph output separate.
    """

    name = "cancel-transpose"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> TransposePair | Miss:
        """Match two transposes with only copies between them."""
        inner = transpose_source(node)
        copied = False
        while isinstance(inner, Node) and is_call(inner, aten.clone.default, aten.alias.default):
            copied = copied or is_call(inner, aten.clone.default)
            inner = node_of(arguments(inner)["self"])
        source = transpose_source(inner)
        if source is None:
            return Miss(MissCode.PATTERN, node, "it is not a second transpose", progress=0)
        if copied and leaves_graph(node):
            text = "the caller gets a copy of {}, not the tensor itself"
            return Miss(MissCode.SHARED, source, text, source.name, progress=0)
        return TransposePair(node, source)

    def rewrite(self, site: TransposePair, rw: Rewriter) -> None:
        """Replace all uses by the matrix itself."""
        rw.replace(site.node, site.source)
