from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.views.drop_view import DropView
from qfuse.testing.build import GraphBuilder


def test_golden_views_of_the_same_shape_go() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", 3, 8)
    size = b.call(aten.sym_size.int, x, 0)
    y = b.call(aten.view.default, x, (size, 3, 8))
    y = b.call(aten.expand.default, b.call(aten.alias.default, y), (-1, 3, 8))
    y = b.call(aten.relu.default, b.call(aten.squeeze.dim, y, 1))

    assert_expected_inline(
        golden(finish(b, y), DropView()),
        """\
%x: float32[s0, 3, 8]
%0 = aten.relu(%x): float32[s0, 3, 8]
return (%0)
fired: drop-view 4""",
    )


def test_refuses_a_view_of_another_shape() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    y = b.call(aten.relu.default, b.call(aten.view.default, x, (8, 3)))

    assert refusal(finish(b, y), DropView()) == (MissCode.SHAPE, "view_default")


def test_refuses_a_shape_that_is_the_same_only_for_some_sizes() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", "s")
    sizes = [b.call(aten.sym_size.int, x, axis) for axis in (1, 0)]
    y = b.call(aten.relu.default, b.call(aten.view.default, x, sizes))

    assert refusal(finish(b, y), DropView()) == (MissCode.SHAPE, "view_default")


def test_refuses_to_give_the_caller_an_input() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    y = b.call(aten.view.default, x, (3, 8))

    assert refusal(finish(b, y), DropView()) == (MissCode.SHARED, "x")


@pytest.mark.numeric
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_values_are_the_same_bits(batch: int) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", 1, 8)
    y = b.call(aten.expand.default, x, (-1, 1, 8))
    z = b.call(aten.relu.default, b.call(aten.expand.default, x, (-1, 4, 8)))

    result = assert_same_values(
        finish(b, b.call(aten.relu.default, y), z),
        [torch.randn(batch, 1, 8)],
        DropView(),
        exact=True,
    )

    assert result.fired == {"drop-view": 1}
