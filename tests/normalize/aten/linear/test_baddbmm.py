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


def source(b: GraphBuilder, bias: torch.Tensor, **scaling: float) -> CapturedGraph:
    """Add ``baddbmm(bias, x, expand(w))`` of 33 to 7 features."""
    x = b.arg("x", bias.dtype, 2, 5, 33)
    w = b.call(aten.expand.default, b.const("w", whole(33, 7, dtype=bias.dtype)), (2, 33, 7))
    return finish(b, b.call(aten.baddbmm.default, b.const("b", bias), x, w, **scaling))


def test_golden_a_bias_of_one_number_per_feature() -> None:
    program = source(GraphBuilder(), torch.randn(7))

    assert_expected_inline(
        golden(program, LINEAR_FROM["baddbmm"]()),
        """\
%x: float32[2, 5, 33]
const %b: float32[7]
const %w_t: float32[7, 33]
%0 = aten.linear(%x, %w_t, %b): float32[2, 5, 7]
return (%0)
fired: linear-from-baddbmm 1""",
    )


@pytest.mark.parametrize("scaling", [{"alpha": 0.5}, {"beta": 2}])
def test_refuses_a_scaled_sum(scaling: dict[str, float]) -> None:
    program = source(GraphBuilder(), torch.randn(7), **scaling)

    assert refusal(program, LINEAR_FROM["baddbmm"]()) == (MissCode.ARGUMENT, "baddbmm_default")


@pytest.mark.parametrize("shape", [(1, 1), (2, 1, 7), (2, 1, 1)])
def test_refuses_a_summand_that_is_no_bias(shape: tuple[int, ...]) -> None:
    program = source(GraphBuilder(), torch.randn(shape))

    assert refusal(program, LINEAR_FROM["baddbmm"]()) == (MissCode.SHAPE, "b")


def test_refuses_a_matrix_per_batch_entry() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 2, 3, 8), b.const("w", torch.randn(2, 8, 4))
    program = finish(b, b.call(aten.baddbmm.default, b.const("b", torch.randn(4)), x, w))

    assert refusal(program, LINEAR_FROM["baddbmm"]()) == (MissCode.PATTERN, "w")


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (1, 1, 7)])
def test_values_agree(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for exact in (True, False):
        make = whole if exact else torch.randn
        program = source(GraphBuilder(), make(*shape).to(dtype))

        inputs = [make(2, 5, 33).to(dtype)]
        result = assert_same_values(program, inputs, LINEAR_FROM["baddbmm"](), exact=exact)

        assert result.fired == {"linear-from-baddbmm": 1}
