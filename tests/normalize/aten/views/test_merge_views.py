from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.views.merge_views import MergeViews
from qfuse.testing.build import GraphBuilder


def test_golden_three_views_are_one() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", 3, 8)
    y = b.call(aten.view.default, x, (-1, 8))
    y = b.call(aten.unsqueeze.default, y, 1)
    y = b.call(aten._unsafe_view.default, y, (-1, 24))

    assert_expected_inline(
        golden(finish(b, y), MergeViews()),
        """\
%x: float32[s0, 3, 8]
%0 = aten.view(%x, (-1, 24)): float32[s0, 24]
return (%0)
fired: merge-views 2""",
    )


def test_golden_a_reshape_that_copies_stays_a_reshape() -> None:
    b = GraphBuilder()
    x = b.call(aten.transpose.int, b.arg("x", torch.float32, 2, 3, 8), 0, 1)
    y = b.call(aten.reshape.default, x, (6, 8))
    y = b.call(aten.view.default, y, (48,))

    assert_expected_inline(
        golden(finish(b, y), MergeViews()),
        """\
%x: float32[2, 3, 8]
%0 = aten.transpose.int(%x, 0, 1): float32[3, 2, 8]
%1 = aten.reshape(%0, (48)): float32[48]
return (%1)
fired: merge-views 1""",
    )


def test_refuses_a_view_of_anything_else() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    y = b.call(aten.view.default, b.call(aten.relu.default, x), (24,))

    assert refusal(finish(b, y), MergeViews()) == (MissCode.PATTERN, "relu_default")


def test_refuses_a_view_of_a_transpose_which_moves_elements() -> None:
    b = GraphBuilder()
    x = b.call(aten.t.default, b.arg("x", torch.float32, 3, 8))
    y = b.call(aten.reshape.default, x, (24,))

    assert refusal(finish(b, y), MergeViews()) == (MissCode.PATTERN, "t_default")


@pytest.mark.numeric
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_values_are_the_same_bits(batch: int) -> None:
    b = GraphBuilder()
    x = b.call(aten.permute.default, b.arg("x", torch.float32, "b", 4, 6), (0, 2, 1))
    inner = b.call(aten.reshape.default, x, (-1, 2, 12))
    outs = [
        b.call(aten.view.default, inner, (-1, 8)),
        b.call(aten.view.default, b.call(aten.squeeze.dims, inner, (1,)), (-1, 24)),
        b.call(aten.view.default, b.call(aten.unsqueeze.default, x, 0), (-1, 6, 4)),
    ]

    inputs = [torch.randn(batch, 4, 6)]
    result = assert_same_values(finish(b, *outs), inputs, MergeViews(), exact=True)

    assert result.fired["merge-views"] >= 3
