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
from qfuse.normalize.aten.views.lift_view import LiftView
from qfuse.normalize.aten.views.merge_views import MergeViews
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder


def test_golden_merged_heads_and_split_rows_are_one_view() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", "s", 2, 4)
    sizes = [b.call(aten.sym_size.int, x, axis) for axis in (0, 1)]
    w = b.const("w", torch.randn(5, 8))
    y = b.call(aten.linear.default, b.call(aten.view.default, x, (-1, 8)), w)
    y = b.call(aten.relu.default, b.call(aten.view.default, y, (*sizes, 5)))

    assert_expected_inline(
        golden(finish(b, y), LiftView(), MergeViews()),
        """\
%x: float32[s0, s1, 2, 4]
%0 = aten.sym_size.int(%x, 0): SymInt
%1 = aten.sym_size.int(%x, 1): SymInt
const %w: float32[5, 8]
%2 = aten.view(%x, (%0, %1, 8)): float32[s0, s1, 8]
%3 = aten.linear(%2, %w): float32[s0, s1, 5]
%4 = aten.relu(%3): float32[s0, s1, 5]
return (%4)
fired: lift-view 1, merge-views 1""",
    )


def source(
    x_shape: tuple[int, ...] | None, sizes: tuple[int, ...], *, twice: bool = False
) -> CapturedGraph:
    """Add ``view(linear(view(x)))`` of ``x [2, 3, 2, 4]``; without ``x_shape``, of a matrix."""
    b = GraphBuilder()
    if x_shape is None:
        x = b.arg("x", torch.float32, 6, 8)
    else:
        x = b.call(aten.view.default, b.arg("x", torch.float32, 2, 3, 2, 4), x_shape)
    y = b.call(aten.linear.default, x, b.const("w", torch.randn(6, 8)))
    view = b.call(aten.view.default, y, sizes)
    return finish(b, view, y) if twice else finish(b, view)


def refused(program: CapturedGraph) -> tuple[MissCode, str]:
    """Return code and node of the refusal at the last view; nothing may be rewritten."""
    refusal(program, LiftView())
    miss = LiftView().match([n for n in program.graph.nodes if n.name.startswith("view")][-1])
    assert isinstance(miss, Miss)
    return miss.code, miss.at.name


def test_refuses_a_view_that_splits_the_last_axis() -> None:
    assert refused(source((6, 8), (2, 3, 2, 3))) == (MissCode.PATTERN, "view_default_1")


def test_refuses_an_input_that_is_no_view() -> None:
    assert refused(source(None, (2, 3, 6))) == (MissCode.PATTERN, "x")


def test_refuses_an_input_that_is_no_matrix() -> None:
    assert refused(source((2, 3, 8), (6, 6))) == (MissCode.PATTERN, "view_default")


def test_refuses_a_linear_that_others_read() -> None:
    program = source((6, 8), (2, 3, 6), twice=True)

    assert refused(program) == (MissCode.SHARED, "linear_default")


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [(1, 1), (2, 3), (5, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_agree(rows: tuple[int, int], dtype: torch.dtype) -> None:
    for exact in (True, False):
        make = whole if exact else torch.randn
        b = GraphBuilder()
        x = b.arg("x", dtype, "b", "s", 3, 11)
        sizes = [b.call(aten.sym_size.int, x, axis) for axis in (0, 1)]
        operands = b.const("w", make(7, 33).to(dtype)), b.const("b", make(7).to(dtype))
        y = b.call(aten.linear.default, b.call(aten.view.default, x, (-1, 33)), *operands)
        program = finish(b, b.call(aten.view.default, y, (*sizes, 7)))

        inputs = [make(*rows, 3, 11).to(dtype)]
        result = assert_same_values(program, inputs, LiftView(), MergeViews(), exact=exact)

        assert result.fired["lift-view"] == 1
