from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, steps
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.splits.cancel_split import CancelSplit

aten = torch.ops.aten


def parts(g: Graph, *sizes: int, axis: int = -1) -> list[Node]:
    """The parts of the input."""
    split = g.call(aten.split_with_sizes.default, g.x, list(sizes), axis)
    return [g.b.item(split, index) for index in range(len(sizes))]


@pytest.mark.numeric
def test_golden_parts_joined_again() -> None:
    g = Graph("m", 12)
    joined = g.call(aten.cat.default, parts(g, 2, 6, 4), -1)
    program = g.done(joined)

    assert applied(program, CancelSplit, m=3).fired == {"cancel-split": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 12]
%0 = aten.neg(%x): float32[s0, 12]
return (%0)""",
    )


@pytest.mark.numeric
def test_golden_tensors_joined_and_split_again() -> None:
    g = Graph("m", 4)
    other = g.b.arg("y", torch.float32, "m", 8)
    joined = g.call(aten.cat.default, [g.x, other], 1)
    split = g.call(aten.split_with_sizes.default, joined, [4, 8], -1)
    program = g.done(*(g.b.item(split, index) for index in range(2)))

    assert applied(program, CancelSplit, m=3).fired == {"cancel-split": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 4]
%y: float32[s0, 8]
%0 = aten.neg(%x): float32[s0, 4]
%1 = aten.neg(%y): float32[s0, 8]
return (%0, %1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(("first", "last"), [(0, 2), (1, 3), (1, 2)])
def test_some_neighbours_are_a_slice(first: int, last: int) -> None:
    g = Graph(3, 12)
    program = g.done(g.call(aten.cat.default, parts(g, 2, 6, 4)[first:last], 1))

    assert applied(program, CancelSplit).fired == {"cancel-split": 1}
    names = [step.partition("[")[0] for step in steps(program)]
    assert (names.count("slice"), names.count("cat")) == (1, 0)


@pytest.mark.numeric
def test_slices_are_parts_too() -> None:
    g = Graph(3, 12)
    cuts = [g.call(aten.slice.Tensor, g.x, 1, *bounds) for bounds in ((0, 5), (5, 12))]
    program = g.done(g.call(aten.cat.default, cuts, 1))

    assert applied(program, CancelSplit).fired == {"cancel-split": 1}


@pytest.mark.numeric
def test_parts_without_elements() -> None:
    g = Graph(3, 12)
    program = g.done(g.call(aten.cat.default, parts(g, 0, 12, 0), 1))

    assert applied(program, CancelSplit).fired == {"cancel-split": 1}


@pytest.mark.numeric
def test_views_of_the_join_are_made_again() -> None:
    g = Graph(3, 12)
    joined = g.call(aten.cat.default, parts(g, 2, 6, 4)[1:], 1)
    program = g.done(g.call(aten.view.default, joined, [30]))

    assert applied(program, CancelSplit).fired == {"cancel-split": 1}


@pytest.mark.numeric
def test_a_join_that_others_read_stays_for_them() -> None:
    g = Graph("m", 4)
    other = g.b.arg("y", torch.float32, "m", 8)
    joined = g.call(aten.cat.default, [g.x, other, g.x], 1)
    split = g.call(aten.split_with_sizes.default, joined, [4, 8, 4], -1)
    program = g.b.done(
        joined, *(g.call(aten.neg.default, g.b.item(split, index)) for index in range(3))
    )

    assert applied(program, CancelSplit, m=3).fired == {"cancel-split": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [0, 1])
def test_any_number_of_rows(rows: int) -> None:
    g = Graph("m", 12)
    program = g.done(g.call(aten.cat.default, parts(g, 2, 10), 1))

    assert applied(program, CancelSplit, m=rows).fired == {"cancel-split": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("case", ["stack", "other tensor", "other axis", "promoted", "no split"])
def test_what_is_no_business_of_it(case: str) -> None:
    g = Graph(6, 6)
    a, b = parts(g, 3, 3)
    other = g.b.arg("y", torch.float32, 6, 3)
    outs = {
        "stack": lambda: g.call(aten.stack.default, [a, b], 1),
        "other tensor": lambda: g.call(aten.cat.default, [a, other], 1),
        "other axis": lambda: g.call(aten.cat.default, [a, b], 0),
        "promoted": lambda: g.call(
            aten.cat.default, [a, g.call(aten._to_copy.default, b, dtype=torch.float64)], 1
        ),
        "no split": lambda: g.call(aten.cat.default, [other, other], 1),
    }
    result = applied(g.done(outs[case]()), CancelSplit)

    assert not result.modified
    assert result.misses == []


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (0, 0, 1)], ids=str)
def test_refuses_another_order(order: tuple[int, ...]) -> None:
    g = Graph(3, 12)
    pieces = parts(g, 4, 4, 4)
    joined = g.call(aten.cat.default, [pieces[index] for index in order], 1)

    miss = only_miss(g.done(joined), CancelSplit)
    assert (miss.code, miss.at) == (MissCode.ORDER, joined)


def test_refuses_an_empty_part_that_ends_before_it_starts() -> None:
    """The part after it starts again earlier, so elements occur twice."""
    g = Graph(3, 8)
    cuts = [g.call(aten.slice.Tensor, g.x, 1, *bounds) for bounds in ((0, 5), (5, 3), (3, 8))]
    joined = g.call(aten.cat.default, cuts, 1)

    miss = only_miss(g.done(joined), CancelSplit)
    assert (miss.code, miss.at) == (MissCode.ORDER, joined)


def test_refuses_parts_with_a_step() -> None:
    g = Graph(3, 12)
    cuts = [g.call(aten.slice.Tensor, g.x, 1, *bounds, 2) for bounds in ((0, 6), (6, 12))]

    assert only_miss(g.done(g.call(aten.cat.default, cuts, 1)), CancelSplit).code is MissCode.SHAPE


def test_refuses_a_join_that_leaves_the_graph() -> None:
    g = Graph(3, 12)
    joined = g.call(aten.cat.default, parts(g, 4, 8), 1)

    miss = only_miss(g.b.done(joined), CancelSplit)
    assert (miss.code, miss.at) == (MissCode.SHARED, joined)


def test_refuses_a_part_that_leaves_the_graph() -> None:
    g = Graph(3, 4)
    joined = g.call(aten.cat.default, [g.x, g.x], 1)
    part = g.b.item(g.call(aten.split.Tensor, joined, 4, 1), 1)

    miss = only_miss(g.b.done(part), CancelSplit)
    assert (miss.code, miss.at) == (MissCode.SHARED, part)


def test_refuses_readers_of_strides() -> None:
    g = Graph(3, 12)
    joined = g.call(aten.cat.default, parts(g, 4, 8), 1)
    memory = g.call(aten.as_strided.default, joined, [3], [2])

    miss = only_miss(g.done(memory), CancelSplit)
    assert (miss.code, miss.at) == (MissCode.ORDER, memory)


def test_refuses_axes_in_another_order() -> None:
    g = Graph(12, 3)
    turned = g.call(aten.transpose.int, g.x, 0, 1)
    split = g.call(aten.split_with_sizes.default, turned, [4, 8], 1)
    joined = g.call(aten.cat.default, [g.b.item(split, 0), g.b.item(split, 1)], 1)

    miss = only_miss(g.done(joined), CancelSplit)
    assert (miss.code, miss.at) == (MissCode.SHAPE, joined)


def test_refuses_other_boundaries() -> None:
    g = Graph(3, 4)
    other = g.b.arg("y", torch.float32, 3, 8)
    joined = g.call(aten.cat.default, [g.x, other], 1)
    part = g.b.item(g.call(aten.split_with_sizes.default, joined, [5, 7], 1), 0)

    miss = only_miss(g.done(part), CancelSplit)
    assert (miss.code, miss.at) == (MissCode.SHAPE, part)
