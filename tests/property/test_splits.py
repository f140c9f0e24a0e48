"""What is done alike on parts of random splits is done on the whole without changing a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.dialects import equal_but_for_nan, strides
from tests.support.strategies.quant_specs import SEEDS
from tests.support.strategies.rowwise import Case
from torch.fx import Node

from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.views import shape_of
from qfuse.ir.sizes import same_shape
from qfuse.ir.stages.verify import verify
from qfuse.optimize.schedule import sink_splits
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.testing.build import GraphBuilder
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.run import random_inputs, run

pytestmark = [pytest.mark.property, pytest.mark.numeric]

aten = torch.ops.aten
LAST = 9223372036854775807


class Forest:
    """Parts of one tensor, each with the values that were computed from it."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.b = GraphBuilder()
        self.count = 0
        rank = draw(st.integers(1, 4))
        self.axis = draw(st.integers(0, rank - 1))
        shape: list[int | str] = [draw(st.sampled_from([2, 1, 3, 4])) for _ in range(rank)]
        sizes = draw(st.lists(st.sampled_from([4, 2, 4, 8, 0, 1, 3]), min_size=2, max_size=4))
        shape[self.axis] = sum(sizes)
        if self.axis and draw(st.booleans()):
            shape[0] = "m"
        self.x = self.b.arg("x", draw(st.sampled_from([torch.float32, torch.bfloat16])), *shape)
        axis = self.axis - draw(st.sampled_from([0, rank]))
        split = self.b.call(aten.split_with_sizes.default, self.x, sizes, axis)
        self.lanes = [[self.b.item(split, index)] for index in range(len(sizes))]
        self.also: list[Node] = []

    def step(self) -> None:
        """Do something to all parts, or to some, or in another way to one of them."""
        op, seed = self.draw(st.sampled_from(_OPS)), self.draw(st.integers(0, 9))
        odd = self.draw(st.integers(-9, len(self.lanes) - 1))
        at = [self.draw(st.integers(0, 5))] * len(self.lanes)
        for index, lane in enumerate(self.lanes):
            x = lane[-1 - at[index] % len(lane)]
            made = op(self, x, seed + (index == odd))
            if made is not None:
                lane.append(made)

    def constant(self, x: Node, seed: int) -> Node:
        """A constant of the rank of ``x`` with one element along most axes."""
        shape = [
            s if isinstance(s, int) and (i * 3 + seed) % 4 == 0 else 1
            for i, s in enumerate(shape_of(x))
        ]
        self.count += 1
        value = torch.linspace(-1, 2, max(torch.Size(shape).numel(), 1))
        value = value[: torch.Size(shape).numel()].reshape(shape).to(x.meta["val"].dtype)
        return self.b.const(
            f"c{seed}_{'_'.join(map(str, shape))}_{value.dtype}".replace(".", ""), value
        )


def _unary(f: Forest, x: Node, seed: int) -> Node:
    ops = [aten.relu.default, aten.neg.default, aten.silu.default, aten.abs.default]
    return f.b.call(ops[seed % 4], x)


def _cast(f: Forest, x: Node, seed: int) -> Node:
    dtype = [torch.float32, torch.bfloat16, torch.float64][seed % 3]
    return f.b.call(aten._to_copy.default, x, dtype=dtype)


def _scaled(f: Forest, x: Node, seed: int) -> Node:
    return f.b.call(aten.mul.Tensor, x, f.constant(x, seed))


def _added(f: Forest, x: Node, seed: int) -> Node | None:
    lane = next(lane for lane in f.lanes if x in lane)
    other = lane[seed % len(lane)]
    if not same_shape(shape_of(other), shape_of(x)):
        return None
    return f.b.call(aten.add.Tensor, x, other, alpha=1 + seed % 2)


def _joined(f: Forest, x: Node, seed: int) -> Node | None:
    if not shape_of(x):
        return None
    axis = seed % len(shape_of(x))
    return f.b.call(aten.cat.default, [f.b.call(aten.neg.default, x), x], axis)


def _turned(f: Forest, x: Node, seed: int) -> Node | None:
    rank = len(shape_of(x))
    return f.b.call(aten.transpose.int, x, seed % rank, -1) if rank else None


def _viewed(f: Forest, x: Node, seed: int) -> Node | None:
    shape = shape_of(x)
    sizes: list[Any] = [
        s if isinstance(s, int) else f.b.call(aten.sym_size.int, x, i) for i, s in enumerate(shape)
    ]
    at = seed % len(shape) if shape else 0
    if not shape or not isinstance(sizes[at], int) or sizes[at] % 2:
        return f.b.call(aten.unsqueeze.default, x, at)
    grown = [*sizes[:at], sizes[at] // 2, 2, *sizes[at + 1 :]]
    if seed % 3 == 2 and at + 1 < len(shape) and isinstance(sizes[at + 1], int):
        grown = [*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :]]
    return f.b.call(aten.reshape.default, x, grown)


def _cut(f: Forest, x: Node, seed: int) -> Node | None:
    rank = len(shape_of(x))
    return f.b.call(aten.slice.Tensor, x, seed % rank, seed % 2, LAST) if rank else None


def _parted(f: Forest, x: Node, seed: int) -> Node | None:
    shape = shape_of(x)
    at = seed % len(shape) if shape else 0
    size = shape[at] if shape else 0
    if not isinstance(size, int) or size < 2:
        return None
    parts = f.b.call(aten.split_with_sizes.default, x, [1, size - 1], at)
    items = [f.b.item(parts, index) for index in range(2)]
    return f.b.call(aten.cat.default, items[:: -1 if seed % 3 == 0 else 1], at)


def _copied(f: Forest, x: Node, seed: int) -> Node:
    del seed
    return f.b.call(aten.clone.default, x, memory_format=torch.contiguous_format)


_OPS = (
    *(_unary, _unary, _scaled, _added, _viewed, _turned, _joined),
    *(_cast, _cut, _parted, _copied),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A split, and what is done to its parts."""
    f = Forest(draw)
    for _ in range(draw(st.integers(1, 6))):
        f.step()
    outs = []
    for lane in f.lanes:
        read = dict.fromkeys((lane[-1], draw(st.sampled_from(lane))))
        leaves = [draw(st.integers(0, 4)) == 0 for _ in read]
        pairs = zip(read, leaves, strict=True)
        outs += [node if alone else f.b.call(aten.neg.default, node) for node, alone in pairs]
    if draw(st.booleans()):
        parts = [lane[0] for lane in f.lanes[draw(st.integers(0, 1)) :]]
        cat = f.b.call(aten.cat.default, parts, f.axis)
        outs.append(f.b.call(aten.relu.default, cat))
    return Case(f.b.done(*outs), draw(st.sampled_from([3, 1, 2, 7])), draw(SEEDS))


@given(cases())
def test_values_and_strides_stay(case: Case) -> None:
    torch.manual_seed(case.seed)
    program, source = case.program, clone(case.program)
    sink_splits(program, RewriteContext("optimize"))
    verify(program)

    inputs = random_inputs(program, m=case.rows)
    for old, new in zip(
        run_fixed_order(source, inputs), run_fixed_order(program, inputs), strict=True
    ):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        assert equal_but_for_nan(old, new), to_text(program.graph)
    olds, news = run(source, inputs), run(program, inputs)
    assert [strides(old) for old in olds] == [strides(new) for new in news]
    assert _sharing(olds) >= _sharing(news), "outputs share memory that did not"
    again = to_text(program.graph)
    assert not sink_splits(program, RewriteContext("optimize")), again


def _sharing(values: tuple[torch.Tensor, ...]) -> set[tuple[int, int]]:
    """The pairs of outputs that live in one storage."""
    owners = [v.untyped_storage().data_ptr() for v in values]
    return {
        (i, j)
        for i in range(len(owners))
        for j in range(i)
        if owners[i] == owners[j] and owners[i] != 0
    }
