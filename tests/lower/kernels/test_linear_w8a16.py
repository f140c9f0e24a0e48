from __future__ import annotations

import pytest
import torch
from tests.support.cases.lowering import (
    NO_KERNELS,
    dequantized,
    lowered,
    pairs,
    the_kernel,
    why_not,
)

from qfuse.ir.events import Exactness
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.element import Element
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
NAME = "qfuse.linear_w8a16"
FLOAT4 = QuantSpec(
    torch.float8_e4m3fn,
    -6,
    6,
    (1, None),
    domain=ZeroPointDomain.NONE,
    element=Element("float4_e2m1"),
)

pytestmark = pytest.mark.own_kernels


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (100,), (2, 1, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_at_every_rank(float_dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    b = GraphBuilder()
    x = b.arg("x", float_dtype, *shape, 50)
    block = QuantizedLinear(b, 70, 50, weight=per_channel(float_dtype=float_dtype))
    weight = block.weight_node()
    row = [b.const("bias", torch.randn(70).to(float_dtype))] if bias else []
    program = b.done(b.call(aten.linear.default, x, weight, *row))
    low = lowered(program)

    assert the_kernel(low) == NAME
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.numeric
def test_the_epilogue_is_in_the_kernel() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 64)
    residual = b.arg("r", torch.float32, "m", 48)
    y = QuantizedLinear(b, 48, 64).linear(x)
    program = b.done(b.call(aten.add.Tensor, b.call(aten.silu.default, y), residual))
    low = lowered(program)

    calls = [n.target for n in low.graph.nodes if n.op == "call_function"]
    assert calls == [torch.ops.qfuse.linear_w8a16.default]
    for new, old in pairs(program, low, m=65):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


def test_refuses_a_quantized_activation() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    block = QuantizedLinear(b, 48, 64)
    low = lowered(b.done(block.linear(block.quantized(x, per_tensor(2)))))

    assert why_not(low, NAME) == "the activation is quantized"


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("rows", [1, 4, 5, 33])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("block", [(1, 32), (1, None), (None, None), (16, 8), (1, 1000)])
@pytest.mark.parametrize("zero_point", [False, True])
def test_values_in_groups(
    block: tuple[int | None, ...], dtype: torch.dtype, zero_point: bool, rows: int
) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, rows, 96)
    spec = per_tensor(2, dtype).with_block(block)
    weight = dequantized(b, (70, 96), spec, zero_point=zero_point)
    program = b.done(b.call(aten.linear.default, x, weight))
    low = lowered(program)

    assert the_kernel(low) == NAME
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


def test_the_graph_has_one_call() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, "m", 64)
    spec = per_channel(float_dtype=torch.bfloat16).with_block((1, 32))
    weight = dequantized(b, (48, 64), spec, zero_point=True)
    low = lowered(b.done(b.call(aten.linear.default, x, weight)))

    (call,) = (n for n in low.graph.nodes if n.op == "call_function")
    assert call.target is torch.ops.qfuse.linear_w8a16.default
    shapes = [tuple(low.module.get_buffer(n.target).shape) for n in call.args[1:4]]
    assert shapes == [(1, 16, 64, 4), (1, 2, 64), (1, 2, 64)]
    assert call.args[4:] == (None, 48, None, None, "", torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("spec", "shape", "reason"),
    [
        (per_channel().with_block((1, 12)), (48, 60), "blocks of 1x12: groups must be whole"),
        (per_channel().with_block((1, 32)), (48, 80), "blocks of 1x32: groups must be whole"),
        (
            per_channel().with_block((None, 1)),
            (48, 64),
            "run along the input features, one each: kernels take one per output feature or per group",
        ),
        (per_channel(dtype=torch.int16), (48, 64), "stored as torch.int16"),
        (FLOAT4, (48, 64), "stored as float4_e2m1"),
        (per_channel(arithmetic=Arithmetic(torch.float64)), (48, 64), "dequantized in float64"),
        (per_channel(float_dtype=torch.float64), (48, 64), "computes in torch.float64"),
        (
            per_channel(arithmetic=Arithmetic(torch.bfloat16)),
            (48, 64),
            "dequantized in bfloat16 and multiplied in float32",
        ),
    ],
)
def test_refuses_weights(spec: QuantSpec, shape: tuple[int, int], reason: str) -> None:
    b = GraphBuilder()
    x = b.arg("x", spec.float_dtype, 2, shape[1])
    weight = dequantized(b, shape, spec)
    low = lowered(b.done(b.call(aten.linear.default, x, weight)))

    assert reason in why_not(low, NAME)


def test_refuses_a_weight_that_is_computed() -> None:
    b = GraphBuilder()
    x, scale = b.arg("x", torch.float32, 2, 64), b.arg("s", torch.float32, 48, 2)
    q = b.const("q", torch.ones(48, 64, dtype=torch.int8))
    weight = b.call(ops.dequantize, q, scale, None, str(per_channel().with_block((1, 32))))
    low = lowered(b.done(b.call(aten.linear.default, x, weight)))

    assert why_not(low, NAME) == "the weight or its parameters are computed at run time"


def test_refuses_when_there_is_no_library() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    low = lowered(b.done(QuantizedLinear(b, 48, 64).linear(x)), NO_KERNELS)

    assert why_not(low, NAME) == "switched off by the test"


@pytest.mark.parametrize("value", [200, 2**32, -(2**40)])
def test_refuses_a_zero_point_that_is_no_byte(value: int) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    zero = b.const("zero", torch.full((48, 1), value))
    q = b.const("q", torch.randint(-128, 128, (48, 64), dtype=torch.int8))
    w = b.call(ops.dequantize, q, b.const("s", torch.rand(48, 1)), zero, str(per_channel()))
    low = lowered(b.done(b.call(aten.linear.default, x, w)))

    assert "a zero point outside [-128, 127]" in why_not(low, NAME)


@pytest.mark.numeric
def test_a_source_that_rounds_every_weight_to_bfloat16_has_a_kernel() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 7, 300)
    narrow = Arithmetic(torch.bfloat16)
    weight = per_channel(float_dtype=torch.bfloat16, arithmetic=narrow)
    program = b.done(QuantizedLinear(b, 70, 300, bias=False, weight=weight).linear(x))
    source = clone(program)
    low = lowered(program)
    assert the_kernel(low) == NAME

    (x_value,) = random_inputs(source)
    q, scale = (source.module.get_buffer(name).double() for name in ("w", "w_scale"))
    truth = x_value.double() @ (q * scale).T
    (old,), (new,) = run(source, [x_value]), run(low, [x_value])
    assert compare(new, old, truth, Exactness.ROUNDING, SITE).wrong is None
    rounded = scale.to(torch.bfloat16).double()
    meant = x_value.double() @ (q * rounded).T
    assert (new.double() - meant).square().mean() < (old.double() - meant).square().mean()
