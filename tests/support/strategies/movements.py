"""Movements of elements, for graphs that grow at random."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from tests.support.strategies.grower import Grower
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops.views import shape_of

aten = torch.ops.aten
_MOST_AXES = 4


def moved(g: Grower, x: Node) -> Node | None:
    """Move the elements of a tensor, if its sizes allow the movement that is drawn."""
    if not shape_of(x):
        return g.b.call(aten.unsqueeze.default, x, 0)
    axis = g.draw(st.integers(0, len(shape_of(x)) - 1))
    return g.pick(_MOVEMENTS)(g, x, axis)


def _flatten(g: Grower, x: Node, axis: int) -> Node | None:
    last = shape_of(x)[-1]
    if not isinstance(last, int) or last == 0:
        return None
    del axis
    return g.b.call(aten.reshape.default, x, [-1, last])


def _transpose(g: Grower, x: Node, axis: int) -> Node | None:
    return g.b.call(aten.transpose.int, x, axis, len(shape_of(x)) - 1 - axis)


def _permute(g: Grower, x: Node, axis: int) -> Node | None:
    del axis
    order = g.draw(st.permutations(range(len(shape_of(x)))))
    return g.b.call(aten.permute.default, x, list(order))


def _unsqueeze(g: Grower, x: Node, axis: int) -> Node | None:
    if len(shape_of(x)) == _MOST_AXES:
        return None
    return g.b.call(aten.unsqueeze.default, x, axis)


def _slice(g: Grower, x: Node, axis: int) -> Node | None:
    size = shape_of(x)[axis]
    if not isinstance(size, int) or size < 2:
        return None
    return g.b.call(aten.slice.Tensor, x, axis, 1, 2**63 - 1, g.pick([1, 2]))


def _select(g: Grower, x: Node, axis: int) -> Node | None:
    size = shape_of(x)[axis]
    if not isinstance(size, int) or size == 0:
        return None
    return g.b.call(aten.select.int, x, axis, 0)


def _split_heads(g: Grower, x: Node, axis: int) -> Node | None:
    *lead, last = shape_of(x)
    if not isinstance(last, int) or last == 0 or last % 2 or len(lead) + 1 == _MOST_AXES:
        return None
    del axis
    known: list[Argument] = [
        size if isinstance(size, int) else g.b.call(aten.sym_size.int, x, index)
        for index, size in enumerate(lead)
    ]
    return g.b.call(aten.reshape.default, x, [*known, 2, last // 2])


def _expand(g: Grower, x: Node, axis: int) -> Node | None:
    size = shape_of(x)[axis]
    if not isinstance(size, int) or size != 1:
        return None
    sizes = [-1] * len(shape_of(x))
    sizes[axis] = 3
    return g.b.call(aten.expand.default, x, sizes)


def _clone(g: Grower, x: Node, axis: int) -> Node | None:
    del axis
    return g.b.call(aten.clone.default, x, memory_format=torch.contiguous_format)


_MOVEMENTS: list[Callable[[Grower, Node, int], Node | None]] = [
    _flatten,
    _transpose,
    _permute,
    _unsqueeze,
    _slice,
    _select,
    _split_heads,
    _expand,
    _clone,
]
