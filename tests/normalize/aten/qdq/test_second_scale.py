from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    codes,
    finish,
    golden,
    refusal,
    scales,
)

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.qdq.second_scale import FoldSecondScale
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel
from qfuse.testing.run import random_inputs

F32 = torch.float32
GROUPS = (1, 1, None)
REST = (None, str(per_channel(3).with_block(GROUPS)))


def source(
    factor: torch.Tensor | float,
    *,
    zero: bool = False,
    divided: bool = False,
    swapped: bool = False,
    at_run_time: bool = False,
    scale: torch.Tensor | None = None,
) -> CapturedGraph:
    """Return a weight ``[6, 4, 8]`` with one scale per group and a factor."""
    b = GraphBuilder()
    made = scales(6, 4, 1) if scale is None else scale
    q = b.arg("w", torch.int8, 6, 4, 8) if at_run_time else b.const("w", codes(6, 4, 8))
    point = b.const("z", codes(6, 4, 1).int()) if zero else None
    domain = "int" if zero else "none"
    spec = str(per_channel(3).with_block(GROUPS)).replace(" int", f" {domain}")
    w = b.call(ops.dequantize, q, b.const("s", made), point, spec)
    by = b.const("t", factor) if isinstance(factor, torch.Tensor) else factor
    op = aten.div.Tensor if divided else aten.mul.Tensor
    return finish(b, b.call(op, *((by, w) if swapped else (w, by))))


def test_golden_one_factor_per_channel() -> None:
    assert_expected_inline(
        golden(source(scales(6, 1, 1), zero=True), FoldSecondScale()),
        """\
const %w: int8[6, 4, 8]
const %s_twice: float32[6, 4, 1]
const %z: int32[6, 4, 1]
%0 = qfuse.dequantize(%w, %s_twice, %z, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[6, 4, 8]
return (%0)
fired: fold-second-scale 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (6, 1, 1), (6, 4, 1), (4, 1)], ids=str)
def test_factors(shape: tuple[int, ...], zero: bool) -> None:
    for program in (
        source(scales(*shape), zero=zero),
        source(scales(*shape), zero=zero, divided=True),
    ):
        fired = assert_same_values(program, random_inputs(program), FoldSecondScale()).fired
        assert fired == {"fold-second-scale": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("by", [-1.5, -scales(6, 1, 1), None], ids=["number", "rows", "neg"])
def test_negative_factors(by: torch.Tensor | float | None) -> None:
    b = GraphBuilder()
    w = b.call(ops.dequantize, b.const("w", codes(6, 4, 8)), b.const("s", scales(6, 4, 1)), *REST)
    if by is None:
        y = b.call(aten.neg.default, w)
    else:
        y = b.call(aten.mul.Tensor, w, b.const("t", by) if isinstance(by, torch.Tensor) else by)
    program = finish(b, y)

    assert assert_same_values(program, [], FoldSecondScale(), exact=by is None).fired


@pytest.mark.numeric
def test_a_number_on_the_left() -> None:
    program = source(0.37, swapped=True)
    fired = assert_same_values(program, random_inputs(program), FoldSecondScale()).fired
    assert fired == {"fold-second-scale": 1}


@pytest.mark.parametrize("wrong", [0.0, float("inf"), float("nan")])
def test_refuses_factors_that_are_no_scales(wrong: float) -> None:
    assert refusal(source(wrong), FoldSecondScale()) == (MissCode.RANGE, "mul_tensor")


def test_refuses_scales_that_leave_the_range() -> None:
    tiny = torch.full((6, 4, 1), 1e-30)
    assert refusal(source(1e-20, scale=tiny), FoldSecondScale())[0] is MissCode.RANGE


def test_refuses_a_factor_per_element() -> None:
    code, _ = refusal(source(scales(6, 4, 8)), FoldSecondScale())
    assert code is MissCode.GRANULARITY


def test_refuses_activations_and_quotients_by_a_weight() -> None:
    assert refusal(source(0.5, at_run_time=True), FoldSecondScale())[0] is MissCode.PATTERN
    program = source(scales(1), divided=True, swapped=True)
    assert refusal(program, FoldSecondScale())[0] is MissCode.PATTERN
