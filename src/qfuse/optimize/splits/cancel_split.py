"""Cancel a split with the join of its parts, and a join with its split."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.movement.slice import Slice
from qfuse.ir.ops.views import node_of, shape_of, tensor_of
from qfuse.ir.sizes import same_strides
from qfuse.optimize.commute.join import CommutingJoin, as_join
from qfuse.optimize.match.strides import restride, stride_sensitive_user
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
class CancelSplitSite:
    """Nodes, and the nodes of equal values that replace them.

    Attributes:
        pairs: Each node and its replacement.
        cut: The axis, start and end of a slice, if only a part of the replacement is used.
    """

    pairs: tuple[tuple[Node, Node], ...]
    cut: tuple[int, int, int] | None = None


class CancelSplit(Rule[CancelSplitSite]):
    """``cat(split(x))`` is ``x``, and ``split(cat(a, b))`` is ``a`` and ``b``.

    Before::

        x -> split == cat -- user          a --+-- cat -- split --+-- user of a
                                           b --'                  '-- user of b

    After::

        x -- user                          a -- user of a
                                           b -- user of b

    A join of neighbouring parts is a slice of the whole.

    Refuses: parts in another order, or of several tensors; boundaries that differ; a result that
    leaves the graph, which was a separate tensor; a stride-sensitive user; strides that would
    change the memory order of later results.
    """

    name = "cancel-split"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.cat.default, *SPLITS)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> CancelSplitSite | Miss:
        """Match a join of neighbouring parts of one tensor, or a split of a join."""
        if is_call(node, *SPLITS):
            return _match_split(node)
        join = as_join(node)
        if join is None:
            return Miss(MissCode.PATTERN, node, "it joins tensors of several dtypes", progress=0)
        return _match_join(join)

    def rewrite(self, site: CancelSplitSite, rw: Rewriter) -> None:
        """Replace all uses by the original values."""
        for old, new in site.pairs:
            if site.cut is not None:
                new = rw.call(aten.slice.Tensor, new, *site.cut)  # noqa: PLW2901
            restride(old, new, rw)


def _match_join(join: CommutingJoin) -> CancelSplitSite | Miss:
    found = [movement_of(part) for part in join.parts]
    parts = [part for part in found if isinstance(part, Slice) and part.axis == join.axis]
    if len(parts) < len(found) or len({part.source for part in parts}) > 1:
        text = "it joins more than parts of one tensor"
        return Miss(MissCode.PATTERN, join.node, text, progress=0)
    known = [p for p in parts if p.start is not None and p.end is not None and p.step == 1]
    if len(known) < len(parts):
        return Miss(MissCode.SHAPE, join.node, "a part of unknown bounds", progress=2)
    # Halves that are joined in the other order, as in rotary positions, are not the tensor.
    # A part that ends before it starts is empty, and would let the next part start again earlier.
    backwards = any(p.end < p.start for p in known)  # type: ignore[operator]
    if backwards or any(a.end != b.start for a, b in itertools.pairwise(known)):
        text = "the parts are not joined in the order in which they were split"
        return Miss(MissCode.ORDER, join.node, text, progress=3)
    source, start, end = known[0].source, known[0].start, known[-1].end
    assert start is not None, "only known bounds remain"
    assert end is not None, "only known bounds remain"
    size = shape_of(source)[join.axis]
    # A symbolic size cannot be compared without a guard, so such a join becomes a slice.
    whole = start == 0 and isinstance(size, int) and size == end
    shown = tensor_of(source).narrow(join.axis, start, max(end - start, 0))
    wrong = _refuse(join.node, shown)
    if wrong is not None:
        return wrong
    return CancelSplitSite(((join.node, source),), None if whole else (join.axis, start, end))


def _match_split(node: Node) -> CancelSplitSite | Miss:
    a = arguments(node)
    join = as_join(node_of(a["self"]))
    axis = a["dim"]
    if join is None or join.is_stack or not isinstance(axis, int):
        return Miss(MissCode.PATTERN, node, "it does not split a join", progress=0)
    if axis % len(shape_of(join.node)) != join.axis:
        return Miss(MissCode.AXIS, node, "it splits along another axis", progress=0)
    # Reversed, so that of several empty parts at one place the first is used.
    bounds = {
        (piece.bounds): piece.node for piece in join.pieces()[::-1] if isinstance(piece, Slice)
    }
    pairs = []
    for user in node.users:
        assert user.target is operator.getitem, "a part of a split is an item of it"
        part = movement_of(user)
        # Items without users do not keep the split.
        if not user.users or not isinstance(part, Slice):
            continue
        # A part of 6 columns of two joined tensors of 4 each belongs to neither.
        joined = bounds.get(part.bounds)
        if joined is None:
            text = "{} is not one of the tensors that were joined"
            return Miss(MissCode.SHAPE, user, text, user.name, progress=2)
        wrong = _refuse(user, tensor_of(joined))
        if wrong is not None:
            return wrong
        pairs.append((user, joined))
    if not pairs:
        return Miss(MissCode.PATTERN, node, "no part of known size has users", progress=0)
    return CancelSplitSite(tuple(pairs))


def _refuse(node: Node, shown: torch.Tensor) -> Miss | None:
    """Refuse to replace ``node`` by ``shown``, which has equal values in other memory."""
    if leaves_graph(node):
        text = "{} leaves the graph, and would share its memory with the split tensor"
        return Miss(MissCode.SHARED, node, text, op_name(node), progress=3)
    rigid = stride_sensitive_user(node)
    if rigid is not None:
        text = "{} depends on the strides"
        return Miss(MissCode.ORDER, rigid, text, op_name(rigid), progress=3)
    # The order of the strides decides the strides of elementwise results.
    with torch.no_grad():
        same = same_strides(torch.empty_like(shown), torch.empty_like(tensor_of(node)))
    if not same:
        text = "the memory order of the axes would change"
        return Miss(MissCode.SHAPE, node, text, progress=3)
    return None
