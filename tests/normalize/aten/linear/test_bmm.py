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
from qfuse.normalize.aten.linear.spellings import LINEAR_FROM
from qfuse.testing.build import GraphBuilder


def test_golden_an_expanded_weight() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, "m", 8)
    w = b.call(aten.t.default, b.const("w", torch.randn(4, 8)))
    y = b.call(aten.bmm.default, x, b.call(aten.expand.default, w, (2, 8, 4)))

    assert_expected_inline(
        golden(finish(b, y), LINEAR_FROM["bmm"]()),
        """\
%x: float32[2, s0, 8]
const %w: float32[4, 8]
%0 = aten.linear(%x, %w): float32[2, s0, 4]
return (%0)
fired: linear-from-bmm 1""",
    )


def test_golden_two_batch_axes_that_were_merged() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 6, 5, 8)
    w = b.call(aten.unsqueeze.default, b.const("w", torch.randn(8, 4)), 0)
    many = b.call(aten.clone.default, b.call(aten.expand.default, w, (2, 3, 8, 4)))
    y = b.call(aten.bmm.default, x, b.call(aten._unsafe_view.default, many, (6, 8, 4)))

    assert_expected_inline(
        golden(finish(b, y), LINEAR_FROM["bmm"]()),
        """\
%x: float32[6, 5, 8]
const %w_t: float32[4, 8]
%0 = aten.linear(%x, %w_t): float32[6, 5, 4]
return (%0)
fired: linear-from-bmm 1""",
    )


def test_refuses_a_matrix_per_batch_entry() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 2, 3, 8), b.const("w", torch.randn(2, 8, 4))
    program = finish(b, b.call(aten.bmm.default, x, w))

    assert refusal(program, LINEAR_FROM["bmm"]()) == (MissCode.PATTERN, "w")


def test_refuses_a_view_that_mixes_batch_entries_with_rows() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 2, 3, 8), b.const("w", torch.randn(4, 4))
    many = b.call(aten.expand.default, w, (4, 4, 4))
    mixed = b.call(aten.reshape.default, many, (2, 8, 4))
    program = finish(b, b.call(aten.bmm.default, x, mixed))

    assert refusal(program, LINEAR_FROM["bmm"]()) == (MissCode.PATTERN, "reshape_default")


def test_refuses_an_expanded_activation() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 2, 3, 8), b.arg("w", torch.float32, 8, 4)
    program = finish(b, b.call(aten.bmm.default, x, b.call(aten.expand.default, w, (2, 8, 4))))

    assert refusal(program, LINEAR_FROM["bmm"]()) == (MissCode.NOT_CONSTANT, "w")


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 9])
def test_values_agree(dtype: torch.dtype, m: int) -> None:
    for exact in (True, False):
        b = GraphBuilder()
        x = b.arg("x", dtype, 3, "m", 33)
        make = whole if exact else torch.randn
        w = b.const("w", make(33, 7).to(dtype))
        y = b.call(aten.bmm.default, x, b.call(aten.expand.default, w, (3, 33, 7)))

        inputs = [make(3, m, 33).to(dtype)]
        result = assert_same_values(finish(b, y), inputs, LINEAR_FROM["bmm"](), exact=exact)

        assert result.fired == {"linear-from-bmm": 1}
