from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.splits.merge_splits import MergeSplits

aten = torch.ops.aten
LAST = 9223372036854775807


@pytest.mark.numeric
def test_golden_a_split_of_a_part_is_one_finer_split() -> None:
    g = Graph("m", 12)
    outer = g.call(aten.split_with_sizes.default, g.x, [2, 6, 4], -1)
    early, late = g.b.item(outer, 0), g.b.item(outer, 2)
    first = g.call(aten.relu.default, early)
    inner = g.call(aten.split.Tensor, g.b.item(outer, 1), 3, 1)
    program = g.done(first, late, *(g.b.item(inner, index) for index in range(2)))

    assert applied(program, MergeSplits, m=3).fired == {"merge-splits": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 12]
%0 = aten.split_with_sizes(%x, (2, 3, 3, 4), 1): (float32[s0, 2], float32[s0, 3], float32[s0, 3], float32[s0, 4])
%1 = getitem(%0, 1): float32[s0, 3]
%2 = getitem(%0, 2): float32[s0, 3]
%3 = getitem(%0, 0): float32[s0, 2]
%4 = getitem(%0, 3): float32[s0, 4]
%5 = aten.relu(%3): float32[s0, 2]
%6 = aten.neg(%5): float32[s0, 2]
%7 = aten.neg(%4): float32[s0, 4]
%8 = aten.neg(%1): float32[s0, 3]
%9 = aten.neg(%2): float32[s0, 3]
return (%6, %7, %8, %9)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("bounds", "step"),
    [((0, 3), 1), ((1, LAST), 1), ((-2, LAST), 1), ((0, -1), 2), ((4, 2), 1), ((9, 12), 1)],
    ids=str,
)
def test_a_slice_of_a_part_is_a_slice_of_the_whole(bounds: tuple[int, int], step: int) -> None:
    g = Graph("m", 12)
    part = g.b.item(g.call(aten.split_with_sizes.default, g.x, [2, 6, 4], -1), 1)
    cut = g.call(aten.slice.Tensor, part, -1, *bounds, step)
    program = g.done(cut)

    assert applied(program, MergeSplits, m=3).fired == {"merge-splits": 1}
    assert [s for s in steps(program) if s.startswith("getitem")] == []


@pytest.mark.numeric
def test_a_slice_of_a_slice_and_what_leaves_the_graph() -> None:
    g = Graph(4, 12)
    cut = g.call(aten.slice.Tensor, g.x, 1, 2, -2)
    program = g.b.done(g.call(aten.slice.Tensor, cut, 1, 3, LAST), cut)

    assert applied(program, MergeSplits).fired == {"merge-splits": 1}


@pytest.mark.numeric
def test_a_part_that_others_read_stays_for_them() -> None:
    g = Graph("m", 12)
    outer = g.call(aten.split.Tensor, g.x, 6, 1)
    part = g.b.item(outer, 0)
    inner = g.call(aten.split_with_sizes.default, part, [0, 4, 2], 1)
    program = g.done(part, g.b.item(outer, 1), *(g.b.item(inner, index) for index in range(3)))

    assert applied(program, MergeSplits, m=2).fired == {"merge-splits": 1}
    assert not applied(program, MergeSplits, m=2).modified


@pytest.mark.numeric
def test_splits_of_two_parts_are_one_split() -> None:
    g = Graph("m", 12)
    outer = g.call(aten.split.Tensor, g.x, 6, 1)
    parts = []
    for index in range(2):
        inner = g.call(aten.split.Tensor, g.b.item(outer, index), 2, 1)
        parts += [g.b.item(inner, place) for place in range(3)]
    program = g.done(*parts)

    assert applied(program, MergeSplits, m=2).fired == {"merge-splits": 2}
    assert len({n for n in program.graph.nodes if n.target is aten.split_with_sizes.default}) == 1


@pytest.mark.numeric
def test_a_split_of_a_slice_is_slices() -> None:
    g = Graph("m", 12)
    cut = g.call(aten.slice.Tensor, g.x, 1, 3, LAST)
    inner = g.call(aten.split.Tensor, cut, 4, 1)
    program = g.done(*(g.b.item(inner, index) for index in range(3)))

    assert applied(program, MergeSplits, m=2).fired == {"merge-splits": 1}


@pytest.mark.numeric
def test_another_axis_is_another_matter() -> None:
    g = Graph(4, 12)
    part = g.b.item(g.call(aten.split.Tensor, g.x, 6, 1), 1)
    program = g.done(g.call(aten.slice.Tensor, part, 0, 1, 3))

    result = applied(program, MergeSplits)
    assert not result.modified
    assert result.misses == []


def test_refuses_a_step() -> None:
    g = Graph("m", 12)
    cut = g.call(aten.slice.Tensor, g.x, 1, 0, 12, 2)
    program = g.done(g.call(aten.slice.Tensor, cut, 1, 1, 3))

    miss = only_miss(program, MergeSplits, m=2)
    assert (miss.code, miss.at) == (MissCode.SHAPE, cut)


def test_refuses_bounds_that_are_not_known() -> None:
    g = Graph("m", 12)
    cut = g.call(aten.slice.Tensor, g.x, 0, 1, LAST)
    program = g.done(g.call(aten.slice.Tensor, cut, 0, 1, 2))

    miss = only_miss(program, MergeSplits, m=7)
    assert (miss.code, miss.at) == (MissCode.SHAPE, cut)


def test_refuses_own_bounds_that_are_not_known() -> None:
    g = Graph(12, "m")
    part = g.call(aten.slice.Tensor, g.x, 0, 1, 9)
    end = g.call(aten.sym_size.int, g.x, 1)
    cut = g.call(aten.slice.Tensor, part, 0, 0, end)
    program = g.done(g.call(aten.slice.Tensor, cut, 1, 0, LAST))

    miss = only_miss(program, MergeSplits, m=4)
    assert (miss.code, miss.at) == (MissCode.SHAPE, cut)
