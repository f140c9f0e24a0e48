from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import CASES, Case, ConvCase, calls, fuse, only_miss
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.fuse.epilogue_add import FuseAdd
from qfuse.optimize.fuse.epilogue_prelu import FusePrelu

aten = torch.ops.aten


def slopes(case: Case, *shape: int) -> Node:
    return case.b.const("slopes", torch.randn(shape))


@pytest.mark.numeric
@pytest.mark.parametrize("channels_last", [False, True])
def test_golden_one_slope_per_channel(channels_last: bool) -> None:
    case = ConvCase(channels_last=channels_last)
    program = case.done(case.b.call(aten.prelu.default, case.y, slopes(case, 4)))

    assert fuse(program, FusePrelu).fired == {"fuse-prelu": 1}
    if not channels_last:
        assert_expected_inline(
            to_text(program.graph),
            """\
%x: float32[s0, 3, 6, 5]
%r: float32[s0, 4, 5, 4]
const %w_s: float32[4, 1, 1, 1]
const %w: int8[4, 3, 2, 2]
const %bias: float32[4]
const %x_scale: float32[1, 1, 1, 1]
const %x_zero: int32[1, 1, 1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): int8[s0, 3, 6, 5]
const %slopes_per_channel: float32[4, 1, 1]
%1 = qfuse.convolution(%0, %x_scale, %x_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', %w, %w_s, None, 'int8[-128,127] 1x*x*x* float32 float32:reciprocal:round-zp int', %bias, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, None, None, '', 'prelu(0)', (%slopes_per_channel)): float32[s0, 4, 5, 4]
return (%1)""",
        )


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
def test_slopes_that_are_an_input(kind: str) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(aten.prelu.default, case.y, case.b.arg("s", torch.float32, 4)))

    assert fuse(program, FusePrelu).fired == {"fuse-prelu": 1}
    assert calls(program)[-1] == f"{kind}[prelu(0)]"


@pytest.mark.numeric
def test_a_single_slope_that_is_an_input() -> None:
    case = ConvCase()
    program = case.done(case.b.call(aten.prelu.default, case.y, case.b.arg("s", torch.float32, 1)))

    assert fuse(program, FusePrelu).fired == {"fuse-prelu": 1}


@pytest.mark.numeric
def test_after_another_operand() -> None:
    case = ConvCase()
    total = case.b.call(aten.add.Tensor, case.y, case.residual)
    program = case.done(case.b.call(aten.prelu.default, total, slopes(case, 4)))
    fuse(program, FuseAdd)

    assert fuse(program, FusePrelu).fired == {"fuse-prelu": 1}
    assert calls(program)[-1] == "convolution[add(0,1.0)|prelu(1)]"


def test_refuses_slopes_along_rows() -> None:
    """Axis 1 is that of the channels for torch, also without a batch."""
    case = ConvCase(batched=False)
    program = case.done(case.b.call(aten.prelu.default, case.y, slopes(case, 5)))

    assert only_miss(program, FusePrelu).code is MissCode.SHAPE


def test_refuses_slopes_along_the_tokens_of_a_linear() -> None:
    case = Case(rank=4)
    program = case.done(case.b.call(aten.prelu.default, case.y, slopes(case, 3)))

    assert only_miss(program, FusePrelu).code is MissCode.SHAPE


@pytest.mark.parametrize("kind", CASES)
def test_refuses_a_product_that_others_read(kind: str) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(aten.prelu.default, case.y, slopes(case, 4)), case.y)

    assert only_miss(program, FusePrelu).code is MissCode.SHARED
