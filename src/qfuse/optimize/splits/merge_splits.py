"""Merge a split or slice of a part into one split or slice of the whole."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.movement.slice import Slice
from qfuse.ir.ops.views import node_of, shape_of
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
class MergeSplitsSite:
    """Slices of a slice, or of a part of a split.

    Attributes:
        outer: The slice or the part.
        start: Its start in its source.
        cuts: Its slices, in order; for a split, all of its parts.
        finer: Sizes of the one split that replaces two; ``None`` if either is a slice.
    """

    outer: Slice
    start: int
    cuts: tuple[Slice, ...]
    finer: tuple[int, ...] | None


class MergeSplits(Rule[MergeSplitsSite]):
    """A split or a slice of a part of a tensor becomes a split or slices of the whole.

    Before::

                   .-- split -- a                  x -> split -- slice -- d
        x -> split          '-- b
                   '-- c

    After::

                   .-- a                           x -> slice -- d
        x -> split --- b
                   '-- c

    All results are views of the same memory as before, with the same strides.

    Refuses: bounds that are not numbers; a first cut with a step. Cuts along another axis do not
    match.
    """

    name = "merge-splits"
    anchors: ClassVar[tuple[OpOverload, ...]] = (*SPLITS, aten.slice.Tensor)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> MergeSplitsSite | Miss:
        """Match a split or a slice of a slice along the same axis."""
        a = arguments(node)
        outer = movement_of(node_of(a["self"]))
        axis = a["dim"]
        if not isinstance(outer, Slice) or not isinstance(axis, int):
            return Miss(MissCode.PATTERN, node, "it does not cut a part", progress=0)
        if axis % len(shape_of(outer.node)) != outer.axis:
            return Miss(MissCode.AXIS, node, "it cuts along another axis", progress=0)
        # x[0:8:2][1:3] is x[2:6:2]: with a step, the bounds of the two cannot simply be added.
        if outer.start is None or outer.end is None or outer.step != 1:
            text = "its operand was cut with a step, or with unknown bounds"
            return Miss(MissCode.SHAPE, outer.node, text, progress=2)
        found = [movement_of(cut) for cut in _cuts(node)]
        # An end of None may be the end of the part, which is not the end of the whole.
        cuts = [c for c in found if isinstance(c, Slice) and None not in {c.start, c.end}]
        if len(cuts) < len(found):
            return Miss(MissCode.SHAPE, node, "its own bounds are not known", progress=2)
        if not cuts:
            return Miss(MissCode.PATTERN, node, "its result has no users", progress=0)
        return MergeSplitsSite(outer, outer.start, tuple(cuts), _finer(node, outer))

    def rewrite(self, site: MergeSplitsSite, rw: Rewriter) -> None:
        """Split the source finer, or slice it."""
        if site.finer is not None:
            _split_finer(site, site.finer, rw)
            return
        for cut in site.cuts:
            assert cut.start is not None, "only known bounds match"
            assert cut.end is not None, "only known bounds match"
            # A slice that ends before it starts is empty.
            start, end = site.start + cut.start, site.start + max(cut.start, cut.end)
            axis, source = site.outer.axis, site.outer.source
            rw.replace(cut.node, rw.call(aten.slice.Tensor, source, axis, start, end, cut.step))


def _cuts(node: Node) -> list[Node]:
    """Return the slices that a node computes: itself, or the items of a split that have users."""
    if is_call(node, aten.slice.Tensor):
        return [node]
    return [user for user in node.users if user.users]


def _finer(node: Node, outer: Slice) -> tuple[int, ...] | None:
    """Return the sizes of the parts of both splits, if ``node`` splits a part of a split."""
    if is_call(node, aten.slice.Tensor) or is_call(outer.node, aten.slice.Tensor):
        return None
    split, index = _place(outer.node)
    sizes = [_sizes(split, outer.axis), _sizes(node, outer.axis)]
    return (*sizes[0][:index], *sizes[1], *sizes[0][index + 1 :])


def _split_finer(site: MergeSplitsSite, sizes: tuple[int, ...], rw: Rewriter) -> None:
    split, at = _place(site.outer.node)
    inner, _ = _place(site.cuts[0].node)
    # At the place of the outer split, since all of its parts may have users in front of the inner.
    with rw.before(split):
        op = aten.split_with_sizes.default
        pieces = rw.call(op, site.outer.source, list(sizes), site.outer.axis)
        for cut in site.cuts:
            rw.replace(cut.node, rw.item(pieces, at + _place(cut.node)[1]))
        grown = len(inner.meta["val"]) - 1
        for part in list(split.users):
            index = _place(part)[1]
            # Parts after the one that was split again have moved.
            if index != at:
                rw.replace(part, rw.item(pieces, index + grown * (index > at)))


def _place(item: Node) -> tuple[Node, int]:
    """Return the split that a node is a part of, and which part it is."""
    assert item.target is operator.getitem, "a part of a split is an item of it"
    split, index = item.args
    return node_of(split), int(str(index))


def _sizes(split: Node, axis: int) -> list[int]:
    return [int(part.shape[axis]) for part in split.meta["val"]]
