from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import CASES, Case, ConvCase, calls, fuse, only_miss

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.fuse.epilogue_add import FuseAdd

add = torch.ops.aten.add.Tensor


@pytest.mark.numeric
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("alpha", [1, 2, -0.5])
def test_a_residual_on_the_right(rank: int, alpha: float) -> None:
    case = Case(rank)
    program = case.done(case.b.call(add, case.y, case.residual, alpha=alpha))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}
    assert calls(program) == ["qfuse.quantize", f"linear[add(0,{float(alpha)})]"]


@pytest.mark.numeric
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_a_residual_of_a_convolution(swapped: bool, batched: bool) -> None:
    case = ConvCase(batched=batched)
    pair = (case.residual, case.y) if swapped else (case.y, case.residual)
    program = case.done(case.b.call(add, *pair))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}
    assert calls(program) == ["qfuse.quantize", "convolution[add(0,1.0)]"]


@pytest.mark.numeric
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("last", ["convolution", "residual", "both"])
def test_the_memory_order_of_a_sum_is_that_of_its_first_operand(swapped: bool, last: str) -> None:
    case = ConvCase(channels_last=last != "residual")
    residual = case.residual if last == "convolution" else case.last(case.residual)
    pair = (residual, case.y) if swapped else (case.y, residual)
    program = case.done(case.b.call(add, *pair))

    if swapped and last != "both":
        miss = only_miss(program, FuseAdd)
        assert miss.code is MissCode.SHAPE
        assert "the strides of the result would change" in miss.reason
    else:
        assert fuse(program, FuseAdd).fired == {"fuse-add": 1}


@pytest.mark.numeric
def test_golden_residual_on_the_left() -> None:
    case = Case()
    program = case.done(case.b.call(add, case.residual, case.y))

    fuse(program, FuseAdd)
    assert calls(program) == ["qfuse.quantize", "linear[add(0,1.0)]"]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
%r: float32[s0, 4]
const %x_scale: float32[1, 1]
const %x_zero: int32[1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[s0, 8]
const %w: int8[4, 8]
const %w_scale: float32[4, 1]
const %w_bias: float32[4]
%1 = qfuse.linear(%0, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %w, %w_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', %w_bias, None, None, '', 'add(0,1.0)', (%r)): float32[s0, 4]
return (%1)""",
    )


@pytest.mark.numeric
def test_two_residuals_are_two_extras() -> None:
    case = Case()
    first = case.b.call(add, case.y, case.residual)
    program = case.done(case.b.call(add, case.residual, first))

    fuse(program, FuseAdd)
    assert calls(program) == ["qfuse.quantize", "linear[add(0,1.0)|add(1,1.0)]"]


def test_two_linears_added_fuse_once() -> None:
    case = Case()
    other = case.block.linear(case.b.call(torch.ops.aten.neg.default, case.x), "v")
    program = case.done(case.b.call(add, case.y, other))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}


def test_refuses_alpha_on_the_linear() -> None:
    case = Case()
    program = case.done(case.b.call(add, case.residual, case.y, alpha=2))

    assert only_miss(program, FuseAdd).code is MissCode.ARGUMENT


@pytest.mark.parametrize("kind", CASES)
def test_refuses_a_product_added_to_itself(kind: str) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(add, case.y, case.y))

    miss = only_miss(program, FuseAdd)
    assert miss.code is MissCode.SHARED
    assert miss.reason == f"the {kind} is added to itself"


def test_refuses_a_number() -> None:
    case = Case()
    program = case.done(case.b.call(add, case.y, 1.5))

    assert only_miss(program, FuseAdd).code is MissCode.ARGUMENT


def test_refuses_a_row_that_broadcasts() -> None:
    case = Case()
    row = case.b.const("row", torch.randn(4))
    program = case.done(case.b.call(add, case.y, row))

    miss = only_miss(program, FuseAdd)
    assert (miss.code, miss.at.name) == (MissCode.SHAPE, row.name)


def test_refuses_a_summand_that_enlarges_the_result() -> None:
    case = Case()
    big = case.b.arg("big", torch.float32, 3, "m", 4)
    program = case.done(case.b.call(add, case.y, big))

    assert only_miss(program, FuseAdd).code is MissCode.SHAPE


def test_refuses_integers() -> None:
    case = Case()
    whole = case.b.arg("whole", torch.int32, "m", 4)
    program = case.done(case.b.call(add, case.y, whole))

    assert only_miss(program, FuseAdd).code is MissCode.DTYPE
