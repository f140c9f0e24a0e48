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
from qfuse.normalize.aten.linear.spellings import LINEAR_FROM
from qfuse.testing.build import GraphBuilder


def product(
    b: GraphBuilder, bias: torch.Tensor, dtype: torch.dtype = torch.float32, **scaling: float
) -> CapturedGraph:
    """Add ``addmm(bias, x, t(w))`` of 8 to 4 features."""
    x = b.arg("x", dtype, "m", 8)
    w = b.call(aten.t.default, b.const("w", whole(4, 8, dtype=dtype)))
    return finish(b, b.call(aten.addmm.default, b.const("b", bias), x, w, **scaling))


def test_golden_a_bias_of_one_number_per_feature() -> None:
    program = product(GraphBuilder(), torch.randn(4))

    assert_expected_inline(
        golden(program, LINEAR_FROM["addmm"]()),
        """\
%x: float32[s0, 8]
const %w: float32[4, 8]
const %b: float32[4]
%0 = aten.linear(%x, %w, %b): float32[s0, 4]
return (%0)
fired: linear-from-addmm 1""",
    )


def test_golden_a_bias_with_a_leading_one_is_viewed() -> None:
    program = product(GraphBuilder(), torch.randn(1, 4))

    assert_expected_inline(
        golden(program, LINEAR_FROM["addmm"]()),
        """\
%x: float32[s0, 8]
const %w: float32[4, 8]
const %b_flat: float32[4]
%0 = aten.linear(%x, %w, %b_flat): float32[s0, 4]
return (%0)
fired: linear-from-addmm 1""",
    )


@pytest.mark.parametrize("scaling", [{"alpha": 0.5}, {"beta": 2}, {"beta": 0}])
def test_refuses_a_scaled_sum(scaling: dict[str, float]) -> None:
    program = product(GraphBuilder(), torch.randn(4), torch.float32, **scaling)

    assert refusal(program, LINEAR_FROM["addmm"]()) == (MissCode.ARGUMENT, "addmm_default")


@pytest.mark.parametrize("shape", [(1,), (), (1, 1), (5, 1), (5, 4)])
def test_refuses_a_summand_that_is_no_bias(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 5, 8), b.const("w", torch.randn(8, 4))
    program = finish(b, b.call(aten.addmm.default, b.const("b", torch.randn(shape)), x, w))

    assert refusal(program, LINEAR_FROM["addmm"]()) == (MissCode.SHAPE, "b")


def test_refuses_one_number_per_row_even_if_there_are_as_many_features() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 4, 8), b.const("w", torch.randn(8, 4))
    program = finish(b, b.call(aten.addmm.default, b.const("b", torch.randn(4, 1)), x, w))

    assert refusal(program, LINEAR_FROM["addmm"]()) == (MissCode.SHAPE, "b")


def test_refuses_two_activations() -> None:
    b = GraphBuilder()
    x, y = b.arg("x", torch.float32, 3, 8), b.arg("y", torch.float32, 8, 4)
    program = finish(b, b.call(aten.addmm.default, b.const("b", torch.randn(4)), x, y))

    assert refusal(program, LINEAR_FROM["addmm"]()) == (MissCode.NOT_CONSTANT, "y")


@pytest.mark.numeric
@pytest.mark.parametrize("m", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_values_are_the_same_bits(m: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    program = product(GraphBuilder(), torch.randn(shape).to(dtype), dtype)

    result = assert_same_values(
        program, [torch.randn(m, 8).to(dtype)], LINEAR_FROM["addmm"](), exact=True
    )

    assert result.fired == {"linear-from-addmm": 1}
