from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.views.cancel_transpose import CancelTranspose
from qfuse.testing.build import GraphBuilder


def test_golden_a_copied_transpose_is_transposed_back() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 3, 8), b.const("w", torch.randn(4, 8))
    t = b.call(aten.clone.default, b.call(aten.permute.default, w, (1, 0)))
    back = b.call(aten.transpose.int, b.call(aten.alias.default, t), -1, -2)
    y = b.call(aten.linear.default, x, back)

    assert_expected_inline(
        golden(finish(b, y), CancelTranspose()),
        """\
%x: float32[3, 8]
const %w: float32[4, 8]
%0 = aten.linear(%x, %w): float32[3, 4]
return (%0)
fired: cancel-transpose 1""",
    )


def test_refuses_one_transpose() -> None:
    b = GraphBuilder()
    y = b.call(aten.t.default, b.call(aten.relu.default, b.arg("x", torch.float32, 3, 8)))

    assert refusal(finish(b, y), CancelTranspose()) == (MissCode.PATTERN, "t_default")


def test_refuses_axes_that_do_not_undo_each_other() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 3, 3)
    y = b.call(aten.permute.default, b.call(aten.permute.default, x, (1, 2, 0)), (1, 2, 0))

    assert refusal(finish(b, y), CancelTranspose())[0] is MissCode.PATTERN


def test_refuses_a_transpose_of_an_axis_with_itself() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 3)
    y = b.call(aten.t.default, b.call(aten.transpose.int, x, 1, -1))

    assert refusal(finish(b, y), CancelTranspose())[0] is MissCode.PATTERN


@pytest.mark.numeric
def test_values_are_the_same_bits() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    y = b.call(aten.t.default, b.call(aten.clone.default, b.call(aten.t.default, x)))

    result = assert_same_values(
        finish(b, b.call(aten.relu.default, y)), [torch.randn(3, 8)], CancelTranspose(), exact=True
    )

    assert result.fired == {"cancel-transpose": 1}
