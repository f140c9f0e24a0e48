from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import CASES, Case, ConvCase, calls, fuse, only_miss

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.fuse.epilogue_activation import FuseActivation
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss

aten = torch.ops.aten

ACTIVATIONS = [
    (aten.relu.default, (), {}, "act(relu)"),
    (aten.silu.default, (), {}, "act(silu)"),
    (aten.sigmoid.default, (), {}, "act(sigmoid)"),
    (aten.tanh.default, (), {}, "act(tanh)"),
    (aten.gelu.default, (), {}, "act(gelu)"),
    (aten.gelu.default, (), {"approximate": "tanh"}, "act(gelu_tanh)"),
    (aten.hardswish.default, (), {}, "act(hardswish)"),
    (aten.hardsigmoid.default, (), {}, "act(hardsigmoid)"),
    (aten.hardtanh.default, (), {}, "act(hardtanh,-1.0,1.0)"),
    (aten.hardtanh.default, (-0.5, 0.25), {}, "act(hardtanh,-0.5,0.25)"),
    (aten.relu6.default, (), {}, "act(hardtanh,0.0,6.0)"),
    (aten.clamp.default, (0,), {}, "act(relu)"),
    (aten.clamp.default, (-1, 2.5), {}, "act(hardtanh,-1.0,2.5)"),
    (aten.clamp_min.default, (0,), {}, "act(relu)"),
    (aten.leaky_relu.default, (), {}, "act(leaky_relu,0.01)"),
    (aten.leaky_relu.default, (0.2,), {}, "act(leaky_relu,0.2)"),
    (aten.clamp.default, (), {"max": 1.0}, "act(hardtanh,-inf,1.0)"),
    (aten.clamp.default, (0.5,), {}, "act(hardtanh,0.5,inf)"),
    (aten.clamp_min.default, (0.1,), {}, "act(hardtanh,0.1,inf)"),
    (aten.clamp_max.default, (6,), {}, "act(hardtanh,-inf,6.0)"),
    (aten.elu.default, (), {}, "act(elu,1.0,1.0,1.0)"),
    (aten.elu.default, (0.5, 2, 0.25), {}, "act(elu,0.5,2.0,0.25)"),
    (aten.selu.default, (), {}, "act(elu,1.6732632423543772,1.0507009873554805,1.0)"),
    (aten.celu.default, (0.5,), {}, "act(elu,0.5,1.0,2.0)"),
    (aten.mish.default, (), {}, "act(mish)"),
]


@pytest.mark.numeric
@pytest.mark.parametrize(("op", "args", "kwargs", "epilogue"), ACTIVATIONS)
@pytest.mark.parametrize("kind", CASES)
def test_every_activation(kind: str, op: Any, args: Any, kwargs: Any, epilogue: str) -> None:
    case = CASES[kind]()
    program = case.done(case.b.call(op, case.y, *args, **kwargs))

    assert fuse(program, FuseActivation).fired == {"fuse-activation": 1}
    assert calls(program) == ["qfuse.quantize", f"{kind}[{epilogue}]"]


SQUARES: dict[str, Any] = {
    "square": lambda b, y: b.call(aten.square.default, y),
    "pow": lambda b, y: b.call(aten.pow.Tensor_Scalar, y, 2),
    "pow of a float": lambda b, y: b.call(aten.pow.Tensor_Scalar, y, 2.0),
    "mul": lambda b, y: b.call(aten.mul.Tensor, y, y),
}


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("how", SQUARES)
@pytest.mark.parametrize("relu", [aten.relu.default, aten.clamp_min.default])
@pytest.mark.parametrize("kind", CASES)
def test_the_square_of_a_relu_is_one_activation(kind: str, relu: Any, how: str) -> None:
    case = CASES[kind]()
    bound = () if relu is aten.relu.default else (0,)
    program = case.done(SQUARES[how](case.b, case.b.call(relu, case.y, *bound)))

    assert fuse(program, FuseActivation).fired == {"fuse-activation": 2}
    assert calls(program) == ["qfuse.quantize", f"{kind}[act(squared_relu)]"]


@pytest.mark.parametrize("how", SQUARES)
@pytest.mark.parametrize("op", [aten.silu.default, aten.relu6.default])
def test_refuses_the_square_of_another_value(op: Any, how: str) -> None:
    case = Case()
    program = case.done(SQUARES[how](case.b, case.b.call(op, case.y)))

    result = fuse(program, FuseActivation)
    assert result.fired == {"fuse-activation": 1}
    assert [miss.reason for _, miss in result.misses] == [
        "it squares a value that is not the result of a ReLU"
    ]


def test_refuses_a_relu_that_others_read_too() -> None:
    case = Case()
    relu = case.b.call(aten.relu.default, case.y)
    program = case.done(case.b.call(aten.square.default, relu), relu)

    result = fuse(program, FuseActivation)
    assert result.fired == {"fuse-activation": 1}
    assert [miss.code for _, miss in result.misses] == [MissCode.SHARED]


def test_a_cube_is_no_near_miss() -> None:
    case = Case()
    relu = case.b.call(aten.relu.default, case.y)
    program = case.done(case.b.call(aten.pow.Tensor_Scalar, relu, 3))

    result = fuse(program, FuseActivation)
    assert result.fired == {"fuse-activation": 1}
    assert result.misses == []


def test_golden_two_activations_in_a_row() -> None:
    case = Case(rank=3)
    first = case.b.call(aten.silu.default, case.y)
    program = case.done(case.b.call(aten.relu.default, first))

    fuse(program, FuseActivation)
    assert calls(program) == ["qfuse.quantize", "linear[act(silu)|act(relu)]"]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, s0, 8]
%r: float32[2, s0, 4]
const %x_scale: float32[1, 1, 1]
const %x_zero: int32[1, 1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): int8[2, s0, 8]
const %w: int8[4, 8]
const %w_scale: float32[4, 1]
const %w_bias: float32[4]
%1 = qfuse.linear(%0, %x_scale, %x_zero, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int', %w, %w_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', %w_bias, None, None, '', 'act(silu)|act(relu)', ()): float32[2, s0, 4]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolution_in_any_memory_order(batched: bool, channels_last: bool) -> None:
    case = ConvCase(batched=batched, channels_last=batched and channels_last)
    program = case.done(case.b.call(aten.silu.default, case.y))

    assert fuse(program, FuseActivation).fired == {"fuse-activation": 1}


@pytest.mark.parametrize("kind", CASES)
def test_refuses_a_product_that_others_read(kind: str) -> None:
    case = CASES[kind]()
    act = case.b.call(aten.relu.default, case.y)
    other = case.b.call(aten.neg.default, case.y)
    program = case.done(act, other)

    miss = only_miss(program, FuseActivation)
    assert miss.code is MissCode.SHARED
    assert miss.reason == f"the {kind}'s own result is also used by aten.neg"


def test_refuses_a_linear_that_leaves_the_graph() -> None:
    case = Case()
    program = case.done(case.b.call(aten.relu.default, case.y), case.y)

    assert only_miss(program, FuseActivation).code is MissCode.SHARED


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.clamp.default, (1.0, -1.0), {}),
        (aten.hardtanh.default, (1.0, -1.0), {}),
    ],
)
def test_refuses_what_has_no_name(op: Any, args: Any, kwargs: Any) -> None:
    case = Case()
    program = case.done(case.b.call(op, case.y, *args, **kwargs))

    assert only_miss(program, FuseActivation).code is MissCode.ARGUMENT


@pytest.mark.parametrize("op", [aten.clamp_min.default, aten.clamp_max.default])
def test_refuses_a_bound_that_is_nan(op: Any) -> None:
    case = Case()
    act = case.b.call(op, case.y, math.nan)
    program = case.done(act)
    apply_rules(program, [FuseLinear()])
    miss = FuseActivation().match(act)

    assert isinstance(miss, Miss)
    assert miss.code is MissCode.ARGUMENT
