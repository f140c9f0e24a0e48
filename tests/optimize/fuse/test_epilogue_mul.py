from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import CASES, Case, ConvCase, calls, fuse, only_miss
from tests.support.values import bits_same

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.fuse.convolution import FuseConvolution
from qfuse.optimize.fuse.epilogue_activation import FuseActivation
from qfuse.optimize.fuse.epilogue_cast import FuseCast
from qfuse.optimize.fuse.epilogue_mul import FuseMul
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.fuse.matmul import FuseMatmul
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.quant import per_tensor
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
mul = aten.mul.Tensor


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_factor_of_the_same_shape(kind: str, swapped: bool) -> None:
    case = CASES[kind]()
    pair = (case.residual, case.y) if swapped else (case.y, case.residual)
    program = case.done(case.b.call(mul, *pair))

    assert fuse(program, FuseMul).fired == {"fuse-mul": 1}
    assert calls(program) == ["qfuse.quantize", f"{kind}[mul(0)]"]


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
def test_a_factor_that_is_stored_quantized(kind: str) -> None:
    case = CASES[kind]()
    spec = per_tensor(4 if kind == "convolution" else 2, torch.uint8)
    other = case.block.quantized(case.residual, spec, "res")
    program = case.done(case.b.call(mul, other, case.y))

    assert fuse(program, FuseMul).fired == {"fuse-mul": 1}
    assert calls(program)[-1] == f"{kind}[mul(0,stored,1,2,{spec})]"


@pytest.mark.numeric
def test_golden_a_gate_per_channel_and_image() -> None:
    case = ConvCase()
    mean = case.b.call(aten.mean.dim, case.residual, [2, 3], True)
    gate = case.b.call(aten.sigmoid.default, mean)
    program = case.done(case.b.call(mul, gate, case.y))

    assert fuse(program, FuseMul).fired == {"fuse-mul": 1}
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
%1 = aten.mean.dim(%r, (2, 3), True): float32[s0, 4, 1, 1]
%2 = aten.sigmoid(%1): float32[s0, 4, 1, 1]
%3 = qfuse.convolution(%0, %x_scale, %x_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', %w, %w_s, None, 'int8[-128,127] 1x*x*x* float32 float32:reciprocal:round-zp int', %bias, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, None, None, '', 'mul(0)', (%2)): float32[s0, 4, 5, 4]
return (%3)""",
    )


@pytest.mark.numeric
def test_a_gate_and_a_linear_of_other_inputs() -> None:
    case = Case()
    up = case.block.linear(case.b.call(aten.neg.default, case.x), "v")
    gate = case.b.call(aten.silu.default, case.y)
    program = case.done(case.b.call(mul, gate, up))
    source = clone(program)
    fired = apply_rules(program, [FuseLinear(), FuseActivation(), FuseMul()]).fired

    assert fired == {"fuse-linear": 2, "fuse-activation": 1, "fuse-mul": 1}
    assert sorted(calls(program)) == [
        "aten.neg",
        "linear[]",
        "linear[act(silu)|mul(0)]",
        "qfuse.quantize",
    ]
    inputs = random_inputs(program, m=3)
    assert bits_same(run(program, inputs), run(source, inputs))


@pytest.mark.numeric
@pytest.mark.parametrize("number", [1.7, 2, -0.0, float("inf")])
@pytest.mark.parametrize("kind", CASES)
def test_a_number(kind: str, number: float) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(mul, case.y, number))

    assert fuse(program, FuseMul).fired == {"fuse-mul": 1}


@pytest.mark.parametrize("swapped", [False, True])
def test_refuses_another_memory_order(swapped: bool) -> None:
    case = ConvCase()
    other = case.last(case.residual)
    program = case.done(case.b.call(mul, *((other, case.y) if swapped else (case.y, other))))

    if swapped:
        assert only_miss(program, FuseMul).code is MissCode.SHAPE
    else:
        assert fuse(program, FuseMul).fired == {"fuse-mul": 1}


@pytest.mark.parametrize("kind", CASES)
def test_a_gate_that_no_linear_computes(kind: str) -> None:
    case = CASES[kind]()
    gate = case.b.call(aten.silu.default, case.residual)
    program = case.done(case.b.call(mul, gate, case.y))

    if kind != "linear":
        assert fuse(program, FuseMul).fired == {"fuse-mul": 1}
    else:
        miss = only_miss(program, FuseMul)
        assert (miss.code, miss.at.name) == (MissCode.ORDER, gate.name)


@pytest.mark.parametrize("kind", CASES)
def test_refuses_a_square(kind: str) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(mul, case.y, case.y))

    miss = only_miss(program, FuseMul)
    assert miss.code is MissCode.SHARED
    assert miss.reason == f"the {kind} is combined with itself"


@pytest.mark.parametrize("kind", CASES)
def test_refuses_a_number_for_narrow_floats(kind: str) -> None:
    case = CASES[kind]()
    narrow = case.b.call(aten._to_copy.default, case.y, dtype=torch.bfloat16)
    program = case.done(case.b.call(mul, narrow, 0.1))
    apply_rules(program, [FuseLinear(), FuseConvolution(), FuseMatmul(), FuseCast()])

    miss = only_miss(program, FuseMul)
    assert (miss.code, miss.reason) == (MissCode.ARGUMENT, "the factor is a number")


@pytest.mark.numeric
def test_one_factor_per_feature_of_a_linear() -> None:
    case = Case(3)
    factor = case.b.const("gamma", torch.randn(4))
    program = case.done(case.b.call(mul, factor, case.y))

    assert fuse(program, FuseMul).fired == {"fuse-mul": 1}
    assert calls(program) == ["qfuse.quantize", "linear[mul(0)]"]


def test_refuses_a_factor_that_enlarges_the_result() -> None:
    case = ConvCase(batched=False)
    big = case.b.arg("big", torch.float32, 3, 4, 5, 4)
    program = case.done(case.b.call(mul, case.y, big))

    assert only_miss(program, FuseMul).code is MissCode.SHAPE


@pytest.mark.numeric
def test_refuses_a_convolution_that_is_enlarged() -> None:
    case = ConvCase()
    small = case.b.call(aten.slice.Tensor, case.y, 3, 0, 1)
    program = case.done(case.b.call(mul, small, case.residual))

    assert not fuse(program, FuseMul).modified


def test_refuses_integers() -> None:
    case = ConvCase()
    whole = case.b.arg("whole", torch.int32, "m", 4, 5, 4)
    program = case.done(case.b.call(mul, case.y, whole))

    assert only_miss(program, FuseMul).code is MissCode.DTYPE


def test_refuses_a_product_that_others_read() -> None:
    case = ConvCase()
    program = case.done(case.b.call(mul, case.y, case.residual), case.y)

    assert only_miss(program, FuseMul).code is MissCode.SHARED


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("number", [8, 8.0, -0.5, 2.0**40])
def test_a_quotient_by_a_power_of_two(kind: str, number: float) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(aten.div.Tensor, case.y, number))

    assert fuse(program, FuseMul).fired == {"fuse-mul": 1}
    assert calls(program)[-1] == f"{kind}[mul(0)]"


@pytest.mark.parametrize("number", [3.0, 0.0, float("inf"), 2.0**-100])
def test_refuses_other_divisors(number: float) -> None:
    case = CASES["matmul"]()
    program = case.done(case.b.call(aten.div.Tensor, case.y, number))

    miss = only_miss(program, FuseMul)
    assert miss.code is MissCode.ARGUMENT
    assert miss.reason == f"it is divided by {number}, whose reciprocal is rounded"


def test_a_quotient_by_a_tensor_is_not_reported() -> None:
    case = CASES["matmul"]()
    program = case.done(case.b.call(aten.div.Tensor, case.residual, case.y))
    result = fuse(program, FuseMul)

    assert (result.modified, list(result.misses)) == (False, [])


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
def test_a_number_that_narrow_floats_hold(kind: str) -> None:
    case = CASES[kind]()
    narrow = case.b.call(aten._to_copy.default, case.y, dtype=torch.bfloat16)
    program = case.done(case.b.call(aten.div.Tensor, case.b.call(mul, narrow, 1.5), 4.0))
    apply_rules(program, [FuseLinear(), FuseConvolution(), FuseMatmul(), FuseCast()])

    assert fuse(program, FuseMul).fired == {"fuse-mul": 2}
