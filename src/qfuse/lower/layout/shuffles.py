"""Channel shuffles, which a row-major view writes in a way that no channels-last image allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from qfuse.ir.movement.registry import movement_of
from qfuse.ir.movement.reshape import Copy, Permute, View
from qfuse.ir.ops.views import shape_of
from qfuse.ir.sizes import same_shape
from qfuse.rewrite.prelude import Rewriter, aten


@dataclass(frozen=True, slots=True)
class Shuffle:
    """The channels of ``[N, C, *S]``, as ``[N, groups, C / groups, *S]``, in the other order.

    Attributes:
        node: The view that ends it.
        between: The ops before it, from the first view on; each has one user.
        groups: The number of channel groups.
    """

    node: Node
    between: tuple[Node, ...]
    groups: int

    @property
    def source(self) -> Node:
        """The image."""
        view = movement_of(self.between[0])
        assert view is not None, "it begins with a view"
        return view.source

    def emit(self, rw: Rewriter) -> Node:
        """Shuffle the channels of the source, which are adjacent; the result is channels-last."""
        rank = len(shape_of(self.node))
        channels = int(shape_of(self.node)[1])
        pixels = rw.call(aten.permute.default, self.source, [0, *range(2, rank), 1])
        sizes = rw.sizes(pixels, rank - 1)
        parts = [self.groups, channels // self.groups]
        grouped = rw.call(aten.view.default, pixels, [*sizes, *parts])
        turned = rw.call(aten.transpose.int, grouped, rank - 1, rank)
        dense = rw.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        joined = rw.call(aten.view.default, dense, [*sizes, channels])
        return rw.call(aten.permute.default, joined, [0, rank - 1, *range(1, rank - 1)])


def find_shuffles(nodes: Iterable[Node]) -> dict[Node, Shuffle]:
    """Return the channel shuffles by their last nodes."""
    found = ((node, shuffle_of(node)) for node in nodes)
    return {node: shuffle for node, shuffle in found if shuffle is not None}


def shuffle_of(node: Node) -> Shuffle | None:
    """View the end of ``reshape(transpose(reshape(x)))`` as a channel shuffle, or ``None``."""
    between: list[Node] = []
    last = movement_of(node)
    if not isinstance(last, View):
        return None
    step = _before(last.source, between)
    while isinstance(step, Copy):
        step = _before(step.source, between)
    if not isinstance(step, Permute) or not _swaps_groups(step.dims):
        return None
    first = _before(step.source, between)
    if not isinstance(first, View) or any(len(each.users) > 1 for each in between):
        return None
    batch, groups, channels, *sizes = first.after
    if not isinstance(groups, int) or not isinstance(channels, int) or 1 in {groups, channels}:
        return None
    shape = (batch, groups * channels, *sizes)
    if not same_shape(first.before, shape) or not same_shape(last.after, shape):
        return None
    return Shuffle(node, tuple(reversed(between)), groups)


def _before(node: Node, between: list[Node]) -> object:
    """Return the movement that computes ``node``, which is one of the ops of a shuffle."""
    between.append(node)
    return movement_of(node)


def _swaps_groups(dims: tuple[int, ...]) -> bool:
    """Whether a permutation swaps the two axes after the batch."""
    return len(dims) > 2 and dims == (0, 2, 1, *range(3, len(dims)))  # noqa: PLR2004
