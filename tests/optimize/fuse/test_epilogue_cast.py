from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import Case, ConvCase, calls, fuse, only_miss

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.fuse.epilogue_cast import FuseCast

cast = torch.ops.aten._to_copy.default


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrowing_cast_rounds_where_it_stood(dtype: torch.dtype) -> None:
    case = Case(rank=3)
    program = case.done(case.b.call(cast, case.y, dtype=dtype))

    assert fuse(program, FuseCast).fired == {"fuse-cast": 1}
    name = str(dtype).removeprefix("torch.")
    assert calls(program) == ["qfuse.quantize", f"linear[cast({name})]"]


@pytest.mark.numeric
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_cast_of_a_convolution(channels_last: bool) -> None:
    case = ConvCase(channels_last=channels_last)
    program = case.done(case.b.call(cast, case.y, dtype=torch.bfloat16))

    assert fuse(program, FuseCast).fired == {"fuse-cast": 1}
    assert calls(program)[-1] == "convolution[cast(bfloat16)]"


@pytest.mark.numeric
def test_golden_there_and_back_keeps_the_rounding() -> None:
    case = Case()
    narrow = case.b.call(cast, case.y, dtype=torch.bfloat16)
    program = case.done(case.b.call(cast, narrow, dtype=torch.float32))

    fuse(program, FuseCast)
    assert calls(program) == ["qfuse.quantize", "linear[cast(bfloat16)|cast(float32)]"]
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
%1 = qfuse.linear(%0, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %w, %w_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', %w_bias, None, None, '', 'cast(bfloat16)|cast(float32)', ()): float32[s0, 4]
return (%1)""",
    )


def test_refuses_another_float_type() -> None:
    case = Case()
    program = case.done(case.b.call(cast, case.y, dtype=torch.float64))

    assert only_miss(program, FuseCast).code is MissCode.DTYPE


def test_a_cast_to_integers_is_no_near_miss() -> None:
    case = Case()
    program = case.done(case.b.call(cast, case.y, dtype=torch.int32))

    done = fuse(program, FuseCast)
    assert (dict(done.fired), done.misses) == ({}, [])


def test_refuses_a_change_of_memory_format() -> None:
    case = Case(rank=4)
    node = case.b.call(cast, case.y, dtype=torch.bfloat16, memory_format=torch.channels_last)
    program = case.done(node)

    miss = only_miss(program, FuseCast)
    assert miss.code is MissCode.ARGUMENT
    assert "memory_format" in miss.reason
