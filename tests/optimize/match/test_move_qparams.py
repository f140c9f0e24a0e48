from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.propagate import Graph

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.movement.base import Movement
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_strides
from qfuse.optimize.match.move_qparams import (
    GraphMover,
    ParamMover,
    is_free,
    propagate_up,
)
from qfuse.rewrite.rewriter import GraphEditor, Rewriter

aten = torch.ops.aten


def rewriter(g: Graph) -> Rewriter:
    """A rewriter that adds nodes at the end of a graph."""
    anchor = g.call(aten.neg.default, g.x)
    return GraphEditor(g.b.module).rewriter("test", anchor)


def movement(node: Any) -> Movement:
    """The movement that a node is."""
    found = movement_of(node)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("op", "args", "block"),
    [
        (aten.view.default, ([12, 8],), (1, 1, None)),
        (aten.view.default, ([2, 6, 2, 4],), (1, 1, None)),
        (aten.permute.default, ([2, 0, 1],), (1, None, 4)),
        (aten.transpose.int, (0, 2), (None, None, None)),
        (aten.unsqueeze.default, (1,), (1, 1, None)),
        (aten.clone.default, (), (1, 1, None)),
    ],
    ids=str,
)
def test_what_moves_forward_and_back_is_what_it_was(op: Any, args: Any, block: Any) -> None:
    g = Graph(2, 6, 8)
    scale, _ = g.choose(g.x, block)
    moves = movement(g.call(op, g.x, *args))
    mover = ParamMover(rewriter(g))
    forward = moves.forward(block)
    assert not isinstance(forward, Refusal)
    there = mover.params(scale, [forward])
    backward = moves.backward(forward.block)
    assert not isinstance(backward, Refusal)

    assert mover.params(there, [backward]) is scale


@pytest.mark.parametrize("m", ["m", 3])
def test_rows_come_back_whatever_their_number_is(m: int | str) -> None:
    g = Graph(m, 6, 8)
    scale, _ = g.choose(g.x, (1, 1, None))
    moves = movement(g.call(aten.view.default, g.x, [-1, 8]))
    forward, backward = moves.forward((1, 1, None)), moves.backward((1, None))
    assert not isinstance(forward, Refusal)
    assert not isinstance(backward, Refusal)

    assert ParamMover(rewriter(g)).params(scale, [forward, backward]) is scale


def test_constants_are_moved_at_once() -> None:
    g = Graph(2, 6, 8)
    value = torch.rand(2, 6, 1)
    scale = g.constant(value, "scale")
    moves = movement(g.call(aten.permute.default, g.x, [1, 0, 2]))
    moved = moves.forward((1, 1, None))
    assert not isinstance(moved, Refusal)
    there = ParamMover(rewriter(g)).params(scale, [moved])

    known = constant_of(there)
    assert known is not None
    assert torch.equal(known, value.permute(1, 0, 2))
    assert known.is_contiguous()


def test_stored_constants_keep_the_strides_of_the_movement() -> None:
    g = Graph(4, 6)
    value = torch.rand(4, 6)
    mover = GraphMover(rewriter(g))
    stored = g.constant(value, "w")
    turned = movement(g.call(aten.permute.default, g.x, [1, 0])).apply(mover, mover.open(stored))

    known = constant_of(mover.node(turned, "w"))
    assert known is not None
    assert known.stride() == (1, 6)


def test_a_climb_ends_at_what_is_not_free() -> None:
    g = Graph(4, 6)
    part = g.call(aten.slice.Tensor, g.x, 1, 0, 3)
    flat = g.call(aten.view.default, g.call(aten.clone.default, part), [12])
    found = propagate_up(flat, (None,), is_free)

    assert (len(found.steps), found.source, found.blocked) == (2, part, None)


def test_a_copy_that_others_read_is_not_free() -> None:
    g = Graph(4, 6)
    copy = g.call(aten.clone.default, g.x)
    g.call(aten.neg.default, copy)
    assert is_free(movement(copy))
    g.call(aten.relu.default, copy)
    assert not is_free(movement(copy))


def test_strides_of_axes_of_size_one_say_nothing() -> None:
    a = torch.empty_strided((1, 4), (7, 1))
    b = torch.empty_strided((1, 4), (4, 1))

    assert same_strides(a, b)
    assert not same_strides(a, torch.empty_strided((1, 4), (4, 2)))
