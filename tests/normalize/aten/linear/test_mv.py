from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.linear.spellings import LINEAR_FROM
from qfuse.testing.build import GraphBuilder


def test_golden_a_weight_times_a_vector() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 8)
    y = b.call(aten.mv.default, b.const("w", torch.randn(4, 8)), x)

    assert_expected_inline(
        golden(finish(b, y), LINEAR_FROM["mv"]()),
        """\
%x: float32[8]
const %w: float32[4, 8]
%0 = aten.linear(%x, %w): float32[4]
return (%0)
fired: linear-from-mv 1""",
    )


def test_refuses_an_activation_as_the_matrix() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 8), b.arg("w", torch.float32, 4, 8)
    program = finish(b, b.call(aten.mv.default, w, x))

    assert refusal(program, LINEAR_FROM["mv"]()) == (MissCode.NOT_CONSTANT, "w")


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_same_bits(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    x = b.arg("x", dtype, 33)
    y = b.call(aten.mv.default, b.const("w", torch.randn(7, 33).to(dtype)), x)

    inputs = [torch.randn(33).to(dtype)]
    result = assert_same_values(finish(b, y), inputs, LINEAR_FROM["mv"](), exact=True)

    assert result.fired == {"linear-from-mv": 1}
