from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import CASES, Case, ConvCase, calls, fuse, only_miss

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.ops.product import as_fused_product
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.fuse.output_quantize import FuseOutputQuantize
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.quant import per_tensor, per_token


def channels(rank: int) -> QuantSpec:
    """One scale per channel."""
    axis = rank - 3
    return per_tensor(rank).with_block(tuple(1 if i == axis else None for i in range(rank)))


def test_golden_the_quantize_is_an_argument() -> None:
    case = Case()
    q, _, _ = case.block.stored(case.y, per_tensor(2), "out")
    program = case.done(q)

    assert fuse(program, FuseOutputQuantize).fired == {"fuse-output-quantize": 1}
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
const %out_scale: float32[1, 1]
const %out_zero: int32[1, 1]
%1 = qfuse.linear(%0, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %w, %w_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', %w_bias, %out_scale, %out_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', '', ()): int8[s0, 4]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("rank", [2, 3])
def test_the_range_travels_with_the_quantize(dtype: torch.dtype, rank: int) -> None:
    case = Case(rank)
    spec = replace(per_tensor(rank, dtype), quant_min=0, quant_max=100)
    q, _, _ = case.block.stored(case.y, spec, "out")
    program = case.done(q)

    assert fuse(program, FuseOutputQuantize).fired == {"fuse-output-quantize": 1}
    assert calls(program) == ["qfuse.quantize", "linear[]"]
    fused = as_fused_linear(program.graph.output_node().all_input_nodes[0])
    assert fused is not None
    assert fused.out_params is not None
    assert fused.out_params.spec == spec


@pytest.mark.numeric
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("per", [per_tensor, channels])
def test_the_output_of_a_convolution(
    batched: bool, channels_last: bool, per: Callable[[int], QuantSpec]
) -> None:
    case = ConvCase(batched=batched, channels_last=batched and channels_last)
    spec = per(4 if batched else 3)
    scale = case.b.const("out", torch.rand(spec.grid((1, 4, 5, 4)[-spec.rank :])) * 0.1 + 0.01)
    program = case.done(case.b.call(ops.quantize, case.y, scale, None, str(spec)))

    assert fuse(program, FuseOutputQuantize).fired == {"fuse-output-quantize": 1}
    fused = as_fused_product(program.graph.output_node().all_input_nodes[0])
    assert fused is not None
    assert fused.out_params is not None
    assert fused.out_params.spec == spec


@pytest.mark.parametrize("kind", CASES)
def test_refuses_a_product_that_others_read(kind: str) -> None:
    case = CASES[kind]()
    q, _, _ = case.block.stored(case.y, per_tensor(4 if kind == "convolution" else 2), "out")
    program = case.done(q, case.y)

    miss = only_miss(program, FuseOutputQuantize)
    assert miss.code is MissCode.SHARED
    assert miss.reason == f"the {kind}'s own result is also used by output"


def test_refuses_parameters_chosen_at_run_time() -> None:
    case = Case()
    spec = per_token(2)
    choose = ChooseSpec(Formula.AO_SYMMETRIC, torch.int8, -128, 127, spec.block, 1e-7)
    other = case.b.call(ops.choose_qparams, case.residual, str(choose))
    scale = case.b.item(other, 0)
    program = case.done(case.b.call(ops.quantize, case.y, scale, None, str(spec)))

    miss = only_miss(program, FuseOutputQuantize)
    assert (miss.code, miss.at.name) == (MissCode.NOT_CONSTANT, scale.name)


def test_the_result_is_at_rest() -> None:
    case = Case()
    q, _, _ = case.block.stored(case.y, per_tensor(2), "out")
    program = case.done(q)
    fuse(program, FuseOutputQuantize)

    assert not apply_rules(program, [FuseOutputQuantize()]).modified
