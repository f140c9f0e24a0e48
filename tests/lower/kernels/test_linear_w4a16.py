from __future__ import annotations

import itertools
from dataclasses import replace

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

from qfuse.ir.events import Exactness, Lowered
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor

aten = torch.ops.aten
NAME = "qfuse.linear_w4a16"
SPEC = QuantSpec(torch.int8, -8, 7, (1, 32))
UNSIGNED = QuantSpec(torch.uint8, 0, 15, (1, 32))
OFFSET = replace(UNSIGNED, domain=ZeroPointDomain.FLOAT_OFFSET)

pytestmark = pytest.mark.own_kernels


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("rows", [1, 4, 5, 33])
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [(1, 32), (1, None), (None, None), (16, 8), (1, 1000)])
@pytest.mark.parametrize("zero_point", [False, True])
def test_values(
    block: tuple[int | None, ...], float_dtype: torch.dtype, zero_point: bool, rows: int
) -> None:
    for spec in (SPEC, UNSIGNED, OFFSET, replace(SPEC, quant_min=-7)):
        b = GraphBuilder()
        x = b.arg("x", float_dtype, rows, 96)
        weight = dequantized(
            b, (70, 96), replace(spec, block=block, float_dtype=float_dtype), zero_point=zero_point
        )
        bias = b.const("bias", torch.randn(70).to(float_dtype))
        program = b.done(b.call(aten.linear.default, x, weight, bias))
        low = lowered(program)

        assert the_kernel(low) == NAME
        for new, old in pairs(program, low):
            assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [1, 4, 5, 33])
def test_values_of_weights_that_are_dequantized_in_float16(rows: int) -> None:
    real = torch.float16
    wide = QuantSpec(torch.int8, -128, 127, (1, 32))
    for spec, block in itertools.product((SPEC, UNSIGNED, OFFSET, wide), [(1, 32), (1, None)]):
        b = GraphBuilder()
        x = b.arg("x", real, rows, 96)
        half = replace(spec, block=block, float_dtype=real, arithmetic=Arithmetic(torch.float16))
        weight = dequantized(b, (70, 96), half, zero_point=True)
        program = b.done(b.call(aten.linear.default, x, weight))
        low = lowered(program)

        assert the_kernel(low) == ("qfuse.linear_w8a16" if spec is wide else NAME)
        for new, old in pairs(program, low):
            assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.parametrize(
    ("scale", "offset", "taken"),
    [
        (8000.0, None, True),
        (9000.0, None, False),
        (torch.inf, None, False),
        (torch.nan, None, False),
        (4000.0, 3000.0, True),
        (4000.0, 40000.0, False),
    ],
)
def test_refuses_weights_that_leave_float16(
    scale: float, offset: float | None, *, taken: bool
) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float16, 2, 64)
    spec = replace(SPEC if offset is None else OFFSET, float_dtype=torch.float16)
    spec = replace(spec, arithmetic=Arithmetic(torch.float16))
    q = torch.full((48, 64), 8, dtype=spec.dtype) - (16 if offset is None else 0)
    q[0, 0] += 15 if offset is None else -8
    one = None if offset is None else b.const("z", torch.full((48, 2), offset))
    args = (b.const("q", q), b.const("s", torch.full((48, 2), scale)), one, str(spec))
    low = lowered(b.done(b.call(aten.linear.default, x, b.call(ops.dequantize, *args))))

    if taken:
        assert the_kernel(low) == NAME
    else:
        assert why_not(low, NAME) == (
            "the weight may leave the range of float16, which it is dequantized in"
        )


@pytest.mark.numeric
@pytest.mark.parametrize("k", [1, 5, 7, 12, 65])
def test_values_of_tails(k: int) -> None:
    for spec in (SPEC, UNSIGNED):
        b = GraphBuilder()
        x = b.arg("x", torch.float32, "m", k)
        weight = dequantized(b, (3, k), replace(spec, block=(1, None)), zero_point=True)
        program = b.done(b.call(aten.linear.default, x, weight))
        low = lowered(program)

        assert the_kernel(low) == NAME
        for m in (1, 2, 9):
            for new, old in pairs(program, low, m=m):
                assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.numeric
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [SPEC, OFFSET])
def test_many_rows_multiply_with_the_weight_of_the_source(
    spec: QuantSpec, compute: torch.dtype
) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 64, 64)
    spec = replace(spec, float_dtype=torch.bfloat16, arithmetic=Arithmetic(compute))
    weight = dequantized(b, (70, 64), spec, zero_point=True)
    program = b.done(b.call(aten.linear.default, x, weight))
    low = lowered(program)

    assert the_kernel(low) == NAME
    one = torch.eye(64).bfloat16()
    assert torch.equal(low.module(one)[0], program.module(one)[0])


@pytest.mark.numeric
def test_the_epilogue_is_in_the_kernel() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 64)
    residual = b.arg("r", torch.float32, "m", 48)
    y = QuantizedLinear(b, 48, 64, weight=SPEC).linear(x)
    program = b.done(b.call(aten.add.Tensor, b.call(aten.silu.default, y), residual))
    low = lowered(program)

    assert [n.target for n in low.graph.nodes if n.op == "call_function"] == [
        torch.ops.qfuse.linear_w4a16.default
    ]
    for new, old in pairs(program, low, m=65):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


def test_the_graph_has_what_the_kernel_reads() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 64)
    low = lowered(b.done(QuantizedLinear(b, 70, 64, weight=SPEC, bias=False).linear(x)))

    (call,) = (n for n in low.graph.nodes if n.op == "call_function")
    codes, scale = (low.module.get_buffer(n.target) for n in call.args[1:3])
    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (2, 8, 64, 4))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (2, 2, 64))
    assert call.args[3:] == (None, None, 70, None, None, "", torch.float32, torch.float32)


def test_a_weight_of_two_linears_is_packed_once() -> None:
    b = GraphBuilder()
    x, other = b.arg("x", torch.float32, 9, 64), b.arg("y", torch.float32, 5, 64)
    weight = dequantized(b, (48, 64), SPEC, zero_point=True)
    low = lowered(
        b.done(b.call(aten.linear.default, x, weight), b.call(aten.linear.default, other, weight))
    )

    assert [e.kernel for e in low.log.of(Lowered)] == [NAME, NAME]
    calls = [n for n in low.graph.nodes if n.target is torch.ops.qfuse.linear_w4a16.default]
    names = [[n.target for n in call.args[1:4]] for call in calls]
    assert names[0] == names[1]


@pytest.mark.numeric
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16])
def test_siblings_are_one_linear(float_dtype: torch.dtype) -> None:
    b = GraphBuilder()
    x = b.arg("x", float_dtype, 64, 512)
    spec = replace(SPEC, float_dtype=float_dtype)
    results = [
        b.call(aten.linear.default, x, QuantizedLinear(b, n, 512, weight=spec).weight_node(f"w{n}"))
        for n in (512, 128, 192)
    ]
    program = b.done(*results)
    low = lowered(program)

    assert [e.kernel for e in low.log.of(Lowered)] == [NAME]
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.parametrize(
    ("spec", "shape", "reason"),
    [
        (per_channel(), (48, 64), "span more than 15"),
        (replace(SPEC, block=(1, 12)), (48, 60), "blocks of 1x12: groups must be whole"),
        (replace(SPEC, block=(1, 32)), (48, 80), "blocks of 1x32: groups must be whole"),
        (replace(SPEC, arithmetic=Arithmetic(torch.float16)), (48, 64), "dequantized in float16"),
        (per_channel(dtype=torch.float8_e5m2, domain=ZeroPointDomain.NONE), (48, 64), "float8"),
        (replace(OFFSET, block=(1, None)), (48, 60), "multiples of 8"),
        (replace(OFFSET, quant_max=14), (48, 64), "relative to a value outside [0, 14]"),
    ],
)
def test_refuses_weights(spec: QuantSpec, shape: tuple[int, int], reason: str) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, shape[1])
    offset = spec.domain is ZeroPointDomain.FLOAT_OFFSET
    weight = dequantized(b, shape, spec, zero_point=offset)
    low = lowered(b.done(b.call(aten.linear.default, x, weight)))

    assert reason in why_not(low, NAME)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (8, "outside its 16 codes"),
        (-9, "outside its 16 codes"),
        (200, "outside [-128, 127]"),
        (2**32, "outside [-128, 127]"),
    ],
)
def test_refuses_a_zero_point_that_is_no_code(value: int, reason: str) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    zero = torch.zeros(48, 2, dtype=torch.int64)
    zero[7, 1] = value
    q = b.const("q", torch.randint(-8, 8, (48, 64), dtype=torch.int8))
    args = (q, b.const("s", torch.rand(48, 2)), b.const("z", zero), str(SPEC))
    low = lowered(b.done(b.call(aten.linear.default, x, b.call(ops.dequantize, *args))))

    assert reason in why_not(low, NAME)


def test_refuses_a_quantized_activation_and_a_missing_library() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    block = QuantizedLinear(b, 48, 64, weight=SPEC)
    low = lowered(b.done(block.linear(block.quantized(x, per_tensor(2)))))
    assert why_not(low, NAME) == "the activation is quantized"

    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    low = lowered(b.done(QuantizedLinear(b, 48, 64, weight=SPEC).linear(x)), NO_KERNELS)
    assert why_not(low, NAME) == "switched off by the test"


def test_refuses_a_weight_that_is_computed() -> None:
    b = GraphBuilder()
    x, scale = b.arg("x", torch.float32, 2, 64), b.arg("s", torch.float32, 48, 2)
    q = b.const("q", torch.ones(48, 64, dtype=torch.int8))
    weight = b.call(ops.dequantize, q, scale, None, str(SPEC))
    low = lowered(b.done(b.call(aten.linear.default, x, weight)))

    assert why_not(low, NAME) == "the weight or its parameters are computed at run time"


def test_bytes_that_fit_four_bits_are_taken_as_four() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    q = b.const("q", torch.randint(3, 19, (48, 64), dtype=torch.int8))
    args = (q, b.const("s", torch.rand(48, 1)), None, str(per_channel()))
    low = lowered(b.done(b.call(aten.linear.default, x, b.call(ops.dequantize, *args))))

    assert "outside its 16 codes" in why_not(low, NAME), "zero is none of 3 to 18"
    assert the_kernel(low) == "qfuse.linear_w8a16"
