"""How parameters move with their data, against brute force on one number per element."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.strategies.quant_specs import blocks, shapes
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from qfuse.ir.movement.base import Movement, TensorMover
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.movement.reshape import Copy
from qfuse.ir.quant.reference import expand_blocks
from qfuse.ir.quant.spec import Block, QuantSpec
from qfuse.ir.refusal import Refusal

pytestmark = [pytest.mark.property, pytest.mark.numeric]

aten = torch.ops.aten


def call(op: Any, x: torch.Tensor, *args: Any) -> Node:
    """A node that applies ``op`` to a tensor of ``x``'s shape."""
    graph = Graph()
    source = graph.placeholder("x")
    source.meta["val"] = x
    args = map_aggregate(args, lambda a: constant(graph, a) if isinstance(a, torch.Tensor) else a)
    node = graph.call_function(op, (source, *args))
    node.meta["val"] = op(x, *known(args))
    if isinstance(node.meta["val"], (list, tuple)):
        part = graph.call_function(operator.getitem, (node, len(node.meta["val"]) - 1))
        part.meta["val"] = node.meta["val"][-1]
        return part
    return node


def known(args: Any) -> Any:
    """Arguments, nodes among them as their values."""
    return map_aggregate(args, lambda a: a.meta["val"] if isinstance(a, Node) else a)


def constant(graph: Graph, value: torch.Tensor) -> Node:
    """A node whose value is a tensor."""
    node = graph.get_attr("constant")
    node.meta["val"] = value
    return node


class Values(TensorMover):
    """Applies ops to tensors; nodes among the arguments stand for their values."""

    def call(self, op: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(value, *known(args), **kwargs)


def factorizations(count: int, rank: int) -> Iterator[tuple[int, ...]]:
    """All shapes of ``rank`` axes with ``count`` elements."""
    if rank == 0:
        if count == 1:
            yield ()
        return
    for first in range(1, count + 1):
        if count % first == 0:
            yield from ((first, *rest) for rest in factorizations(count // first, rank - 1))


def views(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """A view in any shape of up to four axes."""
    rank = draw(st.integers(0, 4))
    known = list(factorizations(x.numel(), rank)) if x.numel() else []
    return call(aten.view.default, x, list(draw(st.sampled_from([tuple(x.shape), *known]))))


def expands(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """New axes in front, and repeated axes of size 1."""
    fresh = draw(st.lists(st.integers(1, 3), max_size=2))
    sizes = [draw(st.sampled_from((1, 2, 3) if s == 1 else (s, -1))) for s in x.shape]
    return call(aten.expand.default, x, fresh + sizes)


def repeats(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """Copies along old and new axes."""
    fresh = draw(st.lists(st.integers(1, 2), max_size=1))
    return call(aten.repeat.default, x, fresh + [draw(st.integers(1, 3)) for _ in x.shape])


def slices(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """A slice of one axis, with bounds beyond it and steps."""
    axis = draw(st.integers(-x.ndim, x.ndim - 1))
    ends = st.none() | st.integers(-x.shape[axis] - 1, x.shape[axis] + 1)
    return call(aten.slice.Tensor, x, axis, draw(ends), draw(ends), draw(st.integers(1, 3)))


def picks(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """Some indices of one axis, or one, or a part of a split."""
    axis = draw(st.integers(-x.ndim, x.ndim - 1))
    index = st.integers(0, max(x.shape[axis] - 1, 0))
    if not x.shape[axis]:
        return call(aten.flip.default, x, [axis])
    if draw(st.booleans()):
        return call(aten.split.Tensor, x, draw(index) + 1, axis)
    if draw(st.booleans()):
        return call(aten.select.int, x, axis, draw(index) - draw(st.sampled_from((0, 1))))
    indices = torch.tensor(draw(st.lists(index, max_size=4)), dtype=torch.int64)
    return call(aten.index_select.default, x, axis, indices)


def turns(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """Axes or elements in another order."""
    axis = draw(st.integers(-x.ndim, x.ndim - 1))
    if draw(st.booleans()):
        return call(aten.permute.default, x, draw(st.permutations(range(x.ndim))))
    if draw(st.booleans()):
        return call(aten.flip.default, x, [axis])
    return call(aten.roll.default, x, [draw(st.integers(-5, 5))], [axis])


def ones(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """Axes of size 1 come or go."""
    if draw(st.booleans()):
        return call(aten.squeeze.default, x)
    return call(aten.unsqueeze.default, x, draw(st.integers(-x.ndim - 1, x.ndim)))


def windows(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """Windows that overlap, touch or lie apart."""
    axis = draw(st.integers(-x.ndim, x.ndim - 1))
    if not x.shape[axis]:
        return call(aten.alias.default, x)
    size = draw(st.integers(1, x.shape[axis]))
    return call(aten.unfold.default, x, axis, size, draw(st.integers(1, 5)))


def diagonals(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """A diagonal of two axes."""
    if x.ndim < 2:
        return call(aten.alias.default, x)
    first, second, *_ = draw(st.permutations(range(x.ndim)))
    return call(aten.diagonal.default, x, draw(st.integers(-2, 2)), first, second - x.ndim)


def gathers(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """Elements by index, of the beginning of the other axes."""
    axis = draw(st.integers(-x.ndim, x.ndim - 1))
    if not x.numel():
        return call(aten.alias.default, x)
    cut = draw(st.booleans())
    sizes = [draw(st.integers(1, s)) if cut else s for s in x.shape]
    sizes[axis] = draw(st.integers(1, 4))
    return call(aten.gather.default, x, axis, indices(draw, sizes, x.shape[axis]))


def takes(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """Indices of any rank along one axis, or rows of a table."""
    axis = draw(st.integers(0, x.ndim - 1))
    sizes = draw(st.lists(st.integers(1, 3), max_size=2))
    if not x.shape[axis]:
        return call(aten.alias.default, x)
    if axis == 0 and x.ndim == 2 and draw(st.booleans()):
        return call(aten.embedding.default, x, indices(draw, sizes, x.shape[0]))
    low = draw(st.sampled_from((0, -x.shape[axis])))
    return call(aten.index.Tensor, x, [*[None] * axis, indices(draw, sizes, x.shape[axis]) + low])


def indices(draw: st.DrawFn, sizes: list[int], below: int) -> torch.Tensor:
    """Random indices."""
    count = math.prod(sizes)
    drawn = draw(st.lists(st.integers(0, below - 1), min_size=count, max_size=count))
    return torch.tensor(drawn, dtype=torch.int64).reshape(sizes)


def repeats_of_each(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """Every element several times in a row."""
    axis = draw(st.integers(-x.ndim, x.ndim - 1))
    return call(aten.repeat_interleave.self_int, x, draw(st.integers(1, 4)), axis)


def edges(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """A padding of the last axes with elements that are there."""
    most = min(x.ndim, 2) if x.ndim > 2 else 1
    if x.ndim < 2 or not all(x.shape):
        return call(aten.alias.default, x)
    # A tensor of as many axes as are padded and one more has no batch: torch pads it all the same.
    count = x.ndim - 1 if x.ndim > 2 else most
    pads = [draw(st.integers(0, s - 1)) for s in reversed(x.shape[-count:]) for _ in range(2)]
    mode = draw(st.sampled_from(("reflect", "replicate", "circular")))
    return call(aten.pad.default, x, pads, mode)


def parts_of_all(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """One of the results of taking an axis apart."""
    axis = draw(st.integers(-x.ndim, x.ndim - 1))
    if not x.shape[axis]:
        return call(aten.alias.default, x)
    if draw(st.booleans()):
        return call(aten.unbind.int, x, axis)
    return call(aten.unsafe_split.Tensor, x, draw(st.integers(1, x.shape[axis])), axis)


def copies(draw: st.DrawFn, x: torch.Tensor) -> Node:
    """The same elements."""
    return call(draw(st.sampled_from((aten.clone.default, aten.alias.default))), x)


@st.composite
def movements(draw: st.DrawFn, shape: tuple[int, ...]) -> Node:
    """A movement of a tensor of ``shape`` whose elements count up."""
    x = torch.arange(math.prod(shape)).reshape(shape)
    fixed = (windows, diagonals, gathers, takes, repeats_of_each, edges, parts_of_all)
    of_axes = (slices, picks, turns, *fixed) if shape else ()
    make = draw(st.sampled_from((views, expands, repeats, ones, copies, *of_axes)))
    node: Node = make(draw, x)
    return node


def spread(values: torch.Tensor, block: Block, shape: tuple[int, ...]) -> torch.Tensor:
    """One number per element."""
    return expand_blocks(values, block, shape).expand(shape)


def entries(block: Block, shape: tuple[int, ...]) -> torch.Tensor:
    """A different number for every block."""
    grid = [int(n) for n in QuantSpec(torch.int8, -128, 127, block).grid(shape)]
    return torch.arange(math.prod(grid)).reshape(grid)


def moved_of(node: Node) -> Movement:
    """The movement that ``node`` is."""
    movement = movement_of(node)
    assert movement is not None, f"not recognised: {node.format_node()}"
    return movement


@given(st.data(), shapes(most=3))
def test_parameters_move_forward_like_their_elements(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    block = data.draw(blocks(len(shape)))
    movement = moved_of(data.draw(movements(shape)))
    after = tuple(movement.node.meta["val"].shape)
    moved = movement.forward(block)
    if isinstance(moved, Refusal):
        assert moved.reason
        return
    values = entries(block, shape)
    new = moved.apply(Values(), values)
    assert tuple(new.shape) == tuple(QuantSpec(torch.int8, -128, 127, moved.block).grid(after))
    want = movement.apply(Values(), spread(values, block, shape))
    assert torch.equal(spread(new, moved.block, after), want)


@given(st.data(), shapes(most=3))
def test_parameters_move_backward_like_their_elements(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    movement = moved_of(data.draw(movements(shape)))
    after = tuple(movement.node.meta["val"].shape)
    block = data.draw(blocks(len(after)))
    moved = movement.backward(block)
    if isinstance(moved, Refusal):
        assert moved.reason
        return
    values = entries(block, after)
    old = moved.apply(Values(), values)
    assert tuple(old.shape) == tuple(QuantSpec(torch.int8, -128, 127, moved.block).grid(shape))
    got = movement.apply(Values(), spread(old, moved.block, shape))
    assert torch.equal(got, spread(values, block, after))


@given(st.data(), shapes(most=3))
def test_a_bijection_is_refused_only_where_no_grid_exists(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    block = data.draw(blocks(len(shape)))
    movement = moved_of(data.draw(movements(shape)))
    moved = movement.forward(block)
    if not movement.bijective or not isinstance(moved, Refusal) or not math.prod(shape):
        return
    after = tuple(movement.node.meta["val"].shape)
    labels = movement.apply(Values(), spread(entries(block, shape), block, shape))
    for candidate in itertools.product(*(range(1, size + 1) for size in after)):
        grid = spread(entries(candidate, after), candidate, after)
        pairs = set(zip(labels.flatten().tolist(), grid.flatten().tolist(), strict=True))
        alike = len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
        assert not alike, f"{block} on {shape} is {candidate} on {after}: {moved.reason}"


@given(st.data(), shapes(most=3))
def test_again_is_the_movement(data: st.DataObject, shape: tuple[int, ...]) -> None:
    movement = moved_of(data.draw(movements(shape)))
    x = torch.randn(shape)
    node = movement.node
    args = known(node.args[1:])
    op: Any = node.target
    want = op(x, *args) if op is not operator.getitem else None
    got = movement.apply(Values(), x)
    assert want is None or torch.equal(got, want)
    assert got.shape == node.meta["val"].shape
    assert not isinstance(movement, Copy) or torch.equal(got, x)
