from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import CASES, Case, ConvCase, calls, fuse, only_miss
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.optimize.fuse.convolution import FuseConvolution
from qfuse.optimize.fuse.epilogue_add import FuseAdd
from qfuse.optimize.fuse.epilogue_cast import FuseCast
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.fuse.matmul import FuseMatmul
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.quant import per_tensor

aten = torch.ops.aten
add, sub = aten.add.Tensor, aten.sub.Tensor
F32, BF16 = torch.float32, torch.bfloat16


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
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("alpha", [1, 2, -0.5])
def test_a_difference(kind: str, alpha: float) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(sub, case.y, case.residual, alpha=alpha))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}
    assert calls(program)[-1] == f"{kind}[add(0,{-float(alpha)})]"


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("narrow", [False, True])
def test_a_product_that_is_subtracted(kind: str, narrow: bool) -> None:
    case = CASES[kind]()
    y = case.y
    if narrow:
        y = case.b.call(aten._to_copy.default, y, dtype=BF16)
    program = case.done(case.b.call(sub, case.residual, y))
    apply_rules(program, [FuseLinear(), FuseConvolution(), FuseMatmul(), FuseCast()])

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}
    assert calls(program)[-1].endswith("mul(0)|add(1,1.0)]")


@pytest.mark.parametrize("kind", CASES)
def test_refuses_a_multiple_of_the_product_as_a_subtrahend(kind: str) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(sub, case.residual, case.y, alpha=2))

    miss = only_miss(program, FuseAdd)
    assert miss.code is MissCode.ARGUMENT
    assert miss.reason == f"the {kind} is multiplied by -2.0 before the addition"


def stored(case: Case, dtype: torch.dtype = torch.uint8, float_dtype: torch.dtype = F32) -> Node:
    """The residual with one constant scale: a round trip."""
    rank = len(case.residual.meta["val"].shape)
    x = (
        case.residual
        if float_dtype is F32
        else case.b.call(aten._to_copy.default, case.residual, dtype=float_dtype)
    )
    return case.block.quantized(x, per_tensor(rank, dtype, float_dtype=float_dtype), "res")


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_residual_that_is_stored_quantized(kind: str, swapped: bool, dtype: torch.dtype) -> None:
    case = CASES[kind]()
    other = stored(case, dtype)
    pair, alpha = ((other, case.y), 1) if swapped else ((case.y, other), 0.5)
    program = case.done(case.b.call(add, *pair, alpha=alpha))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}
    spec = per_tensor(4 if kind == "convolution" else 2, dtype)
    text = f"{kind}[add(0,{float(alpha)},stored,1,2,{spec})]"
    assert calls(program) == ["qfuse.quantize", "qfuse.quantize", text]


@pytest.mark.numeric
def test_golden_two_stored_residuals_and_a_float_one() -> None:
    case = ConvCase()
    other, again = stored(case), case.residual
    total = case.b.call(add, case.b.call(add, case.y, other), again)
    program = case.done(case.b.call(add, other, total))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 3}
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
const %res_scale: float32[1, 1, 1, 1]
const %res_zero: int32[1, 1, 1, 1]
%1 = qfuse.quantize(%r, %res_scale, %res_zero, 'uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int'): uint8[s0, 4, 5, 4]
%2 = qfuse.convolution(%0, %x_scale, %x_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', %w, %w_s, None, 'int8[-128,127] 1x*x*x* float32 float32:reciprocal:round-zp int', %bias, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, None, None, '', 'add(0,1.0,stored,1,2,uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int)|add(3,1.0)|add(4,1.0,stored,5,6,uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int)', (%1, %res_scale, %res_zero, %r, %1, %res_scale, %res_zero)): float32[s0, 4, 5, 4]
return (%2)""",
    )


@pytest.mark.numeric
def test_a_stored_residual_that_others_read_as_floats() -> None:
    case = ConvCase()
    other = stored(case)
    program = case.done(case.b.call(add, case.y, other), case.b.call(aten.neg.default, other))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}
    assert "stored" in calls(program)[-1] + calls(program)[-2]
    assert "qfuse.dequantize" in calls(program)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
def test_a_stored_residual_of_another_float_dtype(kind: str) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(add, case.y, stored(case, float_dtype=BF16)))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}


@pytest.mark.numeric
def test_a_residual_with_several_scales_stays_float() -> None:
    case = ConvCase()
    spec = per_tensor(4).with_block((None, 1, None, None))
    scale = case.b.const("many", torch.rand(1, 4, 1, 1) * 0.1 + 0.01)
    q = case.b.call(ops.quantize, case.residual, scale, None, str(spec))
    other = case.b.call(ops.dequantize, q, scale, None, str(spec))
    program = case.done(case.b.call(add, case.y, other))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}
    assert calls(program)[-1] == "convolution[add(0,1.0)]"


def test_the_scales_of_a_residual_that_are_computed_keep_it_float() -> None:
    case = Case()
    spec = per_tensor(2)
    choose = ChooseSpec(Formula.AO_SYMMETRIC, torch.int8, -128, 127, spec.block, 1e-7)
    scale = case.b.item(case.b.call(ops.choose_qparams, case.residual, str(choose)), 0)
    q = case.b.call(ops.quantize, case.residual, scale, None, str(spec))
    other = case.b.call(ops.dequantize, q, scale, None, str(spec))
    program = case.done(case.b.call(add, case.y, other))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}
    assert calls(program)[-1] == "linear[add(0,1.0)]"


@pytest.mark.numeric
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1), (1, 1, 1), (1,), ()], ids=str)
def test_one_value_per_channel_of_a_convolution(
    swapped: bool, batched: bool, shape: tuple[int, ...]
) -> None:
    case = ConvCase(batched=batched)
    other = case.b.const("other", torch.randn(shape))
    pair = (other, case.y) if swapped else (case.y, other)
    program = case.done(case.b.call(add, *pair))

    if not batched and len(shape) == 4:
        assert only_miss(program, FuseAdd).code is MissCode.SHAPE
    else:
        assert fuse(program, FuseAdd).fired == {"fuse-add": 1}


@pytest.mark.numeric
def test_one_value_per_channel_and_image() -> None:
    case = ConvCase()
    mean = case.b.call(aten.mean.dim, case.residual, [2, 3], True)
    program = case.done(case.b.call(add, case.y, mean))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}


@pytest.mark.parametrize(
    "shape", [(4,), (5, 1), (5, 4), (1, 1, 5, 4), (1, 4, 5, 1), (1, 1, 1, 1, 1)]
)
def test_refuses_what_is_not_one_value_per_channel(shape: tuple[int, ...]) -> None:
    case = ConvCase()
    other = case.b.const("other", torch.randn(shape))
    program = case.done(case.b.call(add, case.y, other))

    miss = only_miss(program, FuseAdd)
    assert (miss.code, miss.at.name) == (MissCode.SHAPE, other.name)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("value", [torch.tensor(0.1, dtype=torch.float64), torch.tensor(3)])
def test_a_constant_without_axes_is_a_number(kind: str, value: torch.Tensor) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(add, case.y, case.b.const("other", value)))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}
    assert calls(program)[-1] == f"{kind}[add(0,1.0)]"


def test_refuses_a_scalar_tensor_of_another_dtype() -> None:
    case = ConvCase()
    other = case.b.arg("other", torch.float64)
    program = case.done(case.b.call(add, case.y, other))

    miss = only_miss(program, FuseAdd)
    assert miss.code is MissCode.DTYPE
    assert miss.reason == "a scalar summand of float64 for values of float32"


@pytest.mark.numeric
@pytest.mark.parametrize("number", [1.5, 3, 0.1, -0.0, float("inf")])
@pytest.mark.parametrize("alpha", [1, 0.3])
def test_a_number_for_a_convolution(number: float, alpha: float) -> None:
    case = ConvCase()
    program = case.done(case.b.call(add, case.y, number, alpha=alpha))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}


def test_refuses_a_number_for_narrow_floats() -> None:
    case = ConvCase()
    narrow = case.b.call(aten._to_copy.default, case.y, dtype=BF16)
    program = case.done(case.b.call(add, narrow, 0.1))
    apply_rules(program, [FuseConvolution(), FuseCast()])

    assert only_miss(program, FuseAdd).code is MissCode.ARGUMENT


def test_refuses_true() -> None:
    case = ConvCase()
    program = case.done(case.b.call(add, case.y, True))

    assert only_miss(program, FuseAdd).code is MissCode.ARGUMENT


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
    assert miss.reason == f"the {kind} is combined with itself"


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
