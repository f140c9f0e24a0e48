"""Whatever reads a permuted sum finds its values, and results keep their strides and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Node

from qfuse.ir.graph.text import to_text
from qfuse.ir.sizes import same_shape
from qfuse.ir.stages.verify import verify
from qfuse.optimize.layout.row_major import MakeRowMajor
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

pytestmark = [pytest.mark.property, pytest.mark.numeric]

aten = torch.ops.aten
WIDTH = 4


class Readers:
    """A permuted sum, whose rows several norms read, and random ops on it and on what follows."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.b = GraphBuilder()
        batches: list[int | str] = [2, "n", 1]
        lengths: list[int | str] = [5, "l", 3]
        lead = [draw(st.sampled_from(batches)), draw(st.sampled_from(lengths))]
        x = self.b.arg("x", torch.float32, lead[0], WIDTH, lead[1])
        turned = self.b.call(aten.permute.default, x, [0, 2, 1])
        y = self.b.arg("y", torch.float32, *lead, WIDTH)
        row = self.b.call(aten.slice.Tensor, y, 1, 0, 1)
        total = self.b.call(aten.add.Tensor, turned, self.b.const("c", torch.randn(WIDTH)))
        # With several readers, so that it pays even where values leave.
        self.norms = [self.b.call(aten.layer_norm.default, total, [WIDTH]) for _ in range(3)]
        self.nodes = [x, turned, y, row, self.norms[0], total]

    def step(self) -> None:
        """Add an op, if the drawn operands allow it."""
        op = self.draw(st.sampled_from(_OPS))
        recent = self.nodes[-5:]
        x = recent[self.draw(st.integers(0, len(recent) - 1))]
        made = op(self, x)
        if made is not None:
            self.nodes.append(made)


def _unary(r: Readers, x: Node) -> Node:
    ops = [aten.neg.default, aten.gelu.default, aten.clone.default]
    return r.b.call(r.draw(st.sampled_from(ops)), x)


def _binary(r: Readers, x: Node) -> Node:
    shape = x.meta["val"].shape
    others = [n for n in r.nodes if same_shape(n.meta["val"].shape, shape)]
    ops = [aten.add.Tensor, aten.mul.Tensor]
    return r.b.call(r.draw(st.sampled_from(ops)), x, r.draw(st.sampled_from(others)))


def _permuted(r: Readers, x: Node) -> Node:
    axes = r.draw(st.permutations(range(x.meta["val"].dim())))
    return r.b.call(aten.permute.default, x, axes)


def _of_rows(r: Readers, x: Node) -> Node:
    ops: list[Callable[[], Node]] = [
        lambda: r.b.call(aten.softmax.int, x, -1),
        lambda: r.b.call(aten.mean.dim, x, [-1], True),
        lambda: r.b.call(aten.amax.default, x, [0]),
    ]
    return r.draw(st.sampled_from(ops))()


def _linear(r: Readers, x: Node) -> Node | None:
    width = x.meta["val"].shape[-1]
    if not isinstance(width, int):
        return None
    weight = r.b.const(f"w{len(r.nodes)}", torch.randn(WIDTH, width))
    return r.b.call(aten.linear.default, x, weight)


def _part(r: Readers, x: Node) -> Node | None:
    if not same_shape(x.meta["val"].shape[-1:], [WIDTH]):
        return None
    parts = r.b.call(aten.split.Tensor, x, WIDTH // 2, -1)
    return r.b.item(parts, r.draw(st.integers(0, 1)))


def _flat(r: Readers, x: Node) -> Node:
    return r.b.call(aten.reshape.default, x, [-1, x.meta["val"].shape[-1]])


def _flat_where_known(r: Readers, x: Node) -> Node | None:
    known = all(isinstance(size, int) for size in x.meta["val"].shape)
    return _flat(r, x) if known else None


def _by_strides(r: Readers, x: Node) -> Node:
    return r.b.call(aten.add.Tensor, x, r.b.call(aten.sym_stride.int, x, 0))


_OPS = (_unary, _binary, _permuted, _of_rows, _linear, _part, _flat_where_known, _by_strides)


@st.composite
def readers(draw: st.DrawFn) -> Readers:
    """Draw up to five ops."""
    made = Readers(draw)
    for _ in range(draw(st.integers(0, 5))):
        made.step()
    return made


def _shared(results: tuple[Any, ...]) -> list[bool]:
    """Which pairs of results share memory."""
    memory = [r.untyped_storage().data_ptr() for r in results]
    return [a == b for a, b in itertools.combinations(memory, 2)]


@given(made=readers(), data=st.data())
def test_readers_find_what_they_did(made: Readers, data: st.DataObject) -> None:
    computed = [n for n in made.nodes if n.op == "call_function"]
    returned = data.draw(st.lists(st.sampled_from(computed), max_size=3, unique=True))
    program = made.b.done(*made.norms, *returned)
    source = clone(program)
    MakeRowMajor().run(program, RewriteContext("optimize"))

    verify(program)
    inputs = random_inputs(source, **dict.fromkeys(map(str, source.signature.symbols), 3))
    old, new = run(source, inputs), run(program, inputs)
    for one, other in zip(old, new, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4, msg=to_text(program.graph))
        assert other.stride() == one.stride(), to_text(program.graph)
    kept = zip(_shared(old), _shared(new), strict=True)
    assert all(before or not after for before, after in kept), to_text(program.graph)
