from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    finish,
    golden,
    refusal,
    whole,
)

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.views.drop_view import DropView
from qfuse.normalize.aten.views.merge_views import MergeViews
from qfuse.normalize.aten.views.sink_view import SinkView
from qfuse.testing.build import GraphBuilder


def test_golden_views_around_a_linear_collapse() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", "s", 8)
    sizes = [b.call(aten.sym_size.int, x, axis) for axis in (0, 1)]
    w = b.const("w", torch.randn(4, 8))
    y = b.call(aten.linear.default, b.call(aten.view.default, x, (-1, 8)), w)
    y = b.call(aten.relu.default, b.call(aten.view.default, y, (*sizes, 4)))

    program = finish(b, y)

    assert_expected_inline(
        golden(program, SinkView(), MergeViews(), DropView()),
        """\
%x: float32[s0, s1, 8]
const %w: float32[4, 8]
%0 = aten.linear(%x, %w): float32[s0, s1, 4]
%1 = aten.relu(%0): float32[s0, s1, 4]
return (%1)
fired: sink-view 1, merge-views 1, drop-view 1""",
    )


def test_golden_a_row_of_its_own_and_a_bias() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 8)
    w, bias = b.const("w", torch.randn(4, 8)), b.const("b", torch.randn(4))
    y = b.call(aten.linear.default, b.call(aten.unsqueeze.default, x, 0), w, bias)
    program = finish(b, b.call(aten.squeeze.dim, y, 0))

    assert_expected_inline(
        golden(program, SinkView()),
        """\
%x: float32[8]
const %w: float32[4, 8]
const %b: float32[4]
%0 = aten.linear(%x, %w, %b): float32[4]
%1 = aten.unsqueeze(%0, 0): float32[1, 4]
%2 = aten.squeeze.dim(%1, 0): float32[4]
return (%2)
fired: sink-view 1""",
    )


def test_golden_heads_are_split_from_the_linear_itself() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 3, 8)
    w = b.const("w", torch.randn(6, 8))
    y = b.call(aten.linear.default, b.call(aten.view.default, x, (6, 8)), w)
    program = finish(b, b.call(aten.view.default, y, (2, 3, 2, 3)))

    assert_expected_inline(
        golden(program, SinkView(), MergeViews(), DropView()),
        """\
%x: float32[2, 3, 8]
const %w: float32[6, 8]
%0 = aten.linear(%x, %w): float32[2, 3, 6]
%1 = aten.view(%0, (2, 3, 2, 3)): float32[2, 3, 2, 3]
return (%1)
fired: sink-view 1, merge-views 1""",
    )


def test_golden_a_cast_between_is_crossed() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 2, 3, 8)
    w = b.const("w", torch.randn(4, 8, dtype=torch.bfloat16))
    y = b.call(aten.linear.default, b.call(aten.view.default, x, (6, 8)), w)
    y = b.call(aten._to_copy.default, y, dtype=torch.float32)
    program = finish(b, b.call(aten.view.default, y, (2, 3, 4)))

    assert_expected_inline(
        golden(program, SinkView(), MergeViews(), DropView()),
        """\
%x: bfloat16[2, 3, 8]
const %w: bfloat16[4, 8]
%0 = aten.linear(%x, %w): bfloat16[2, 3, 4]
%1 = aten._to_copy(%0, dtype=float32): float32[2, 3, 4]
return (%1)
fired: sink-view 2, merge-views 1, drop-view 1""",
    )


def linear_of_view(
    last: int, sizes: tuple[int, ...], back: tuple[int, ...] | None
) -> CapturedGraph:
    """Add ``linear(view(x))`` of ``x [2, 3, 8]``, viewed again or not."""
    b = GraphBuilder()
    x = b.call(aten.view.default, b.arg("x", torch.float32, 2, 3, 8), sizes)
    y = b.call(aten.linear.default, x, b.const("w", torch.randn(4, last)))
    return finish(b, y if back is None else b.call(aten.view.default, y, back))


def test_refuses_a_view_that_changes_the_last_axis() -> None:
    program = linear_of_view(4, (2, 3, 2, 4), (2, 3, 8))

    assert refusal(program, SinkView()) == (MissCode.PATTERN, "view_default")


def test_refuses_a_reader_that_is_no_view() -> None:
    program = linear_of_view(8, (6, 8), None)

    assert refusal(program, SinkView()) == (MissCode.SHARED, "output")


def test_refuses_a_cast_that_is_read_as_it_is() -> None:
    b = GraphBuilder()
    x = b.call(aten.view.default, b.arg("x", torch.float32, 2, 3, 8), (6, 8))
    y = b.call(aten._to_copy.default, x, dtype=torch.bfloat16)
    program = finish(b, b.call(aten.relu.default, y))

    assert refusal(program, SinkView()) == (MissCode.SHARED, "relu_default")


def test_refuses_if_no_reader_goes_back() -> None:
    program = linear_of_view(8, (6, 8), (3, 2, 4))

    assert refusal(program, SinkView()) == (MissCode.SHAPE, "view_default")


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("rows", [(1, 1), (2, 3), (5, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_values_agree(rows: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    for exact in (True, False):
        make = whole if exact else torch.randn
        b = GraphBuilder()
        x = b.arg("x", dtype, "b", "s", 33)
        sizes = [b.call(aten.sym_size.int, x, axis) for axis in (0, 1)]
        operands = [b.const("w", make(7, 33).to(dtype))]
        if bias:
            operands.append(b.const("b", make(7).to(dtype)))
        y = b.call(aten.linear.default, b.call(aten.reshape.default, x, (-1, 33)), *operands)
        if dtype is torch.bfloat16:
            y = b.call(aten._to_copy.default, y, dtype=torch.float32)
        program = finish(b, b.call(aten.view.default, y, (*sizes, 7)))

        inputs = [make(*rows, 33).to(dtype)]
        result = assert_same_values(
            program, inputs, SinkView(), MergeViews(), DropView(), exact=exact
        )

        assert result.fired["sink-view"] == (2 if dtype is torch.bfloat16 else 1)
