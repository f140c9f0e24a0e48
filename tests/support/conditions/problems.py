"""One problem that each kernel accepts, or several where its conditions depend on the problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from tests.support.cases.linear_rowwise import LinearRowwiseCase
from tests.support.cases.matmul import Products
from tests.support.cases.quantized_convolution import ConvolutionCase

from qfuse.ir.graph.stage_graph import OptimizedGraph, StageGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.convolution import as_fused_convolution
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.ops.matmul import as_fused_matmul
from qfuse.ir.ops.norm_spec import NormSpec
from qfuse.ir.ops.norms import as_fused_norm
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.ir.refusal import Refusal
from qfuse.lower.problems.convolution import convolution_problem
from qfuse.lower.problems.linear import linear_problem
from qfuse.lower.problems.linear_rowwise import linear_rowwise_problem
from qfuse.lower.problems.matmul import matmul_problem
from qfuse.lower.problems.problem import Problem
from qfuse.lower.problems.rowwise import rowwise_problem
from qfuse.optimize import optimize
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_tensor, stored_like

aten = torch.ops.aten
F32, F16 = torch.float32, torch.float16
ROWS = (1, 1, None)
INT8 = QuantSpec(torch.int8, -128, 127, (1, None))
FOUR = QuantSpec(torch.int8, -8, 7, (1, 16))
OFFSETS = QuantSpec(torch.uint8, 0, 255, (1, 16), domain=ZeroPointDomain.FLOAT_OFFSET)
STATIC = QuantSpec(torch.int8, -128, 127, (None,) * 3)
STORED = STATIC.with_block(ROWS)
CHOSEN = ChooseSpec(Formula.AO_SYMMETRIC, torch.int8, -128, 127, ROWS, 1e-6)
NORM = NormSpec(1, 1e-6, F32, F32, F32, F32)


def problems_of(program: StageGraph) -> Iterator[Problem]:
    """Yield the problems of the ops of an optimized graph."""
    symbols = program.signature.symbols
    for node in program.graph.nodes:
        linear, convolution = as_fused_linear(node), as_fused_convolution(node)
        matmul, rowwise = as_fused_matmul(node), as_fused_norm(node) or as_activation(node)
        both = linear_rowwise_problem(node, symbols)
        if linear is not None:
            yield linear_problem(linear, symbols)
        if convolution is not None:
            yield convolution_problem(convolution, symbols)
        if matmul is not None:
            yield matmul_problem(matmul, symbols)
        if rowwise is not None and rowwise.output.spec is not None:
            alone = rowwise_problem(rowwise, symbols)
            assert not isinstance(alone, Refusal), alone.reason
            yield alone
        if both is not None:
            assert not isinstance(both, Refusal), both.reason
            yield both


def linear(
    weight: QuantSpec,
    *,
    x: QuantSpec | None = None,
    float_dtype: torch.dtype = F32,
    zero_point: bool = False,
) -> OptimizedGraph:
    """Return a linear of 5 rows, 32 to 48 features, of a float or quantized activation."""
    b = GraphBuilder()
    value = b.arg("x", float_dtype, 5, 32)
    if x is not None:
        scale = b.const("x_scale", torch.full((1, 1), 0.02))
        value = b.call(ops.quantize, value, scale, None, str(x))
        value = b.call(ops.dequantize, value, scale, None, str(x))
    spec = replace(weight, float_dtype=float_dtype)
    stored = stored_like(spec, 48, 32) if not spec.dtype.is_floating_point else torch.rand(48, 32)
    grid = [int(size) for size in spec.grid((48, 32))]
    zero = None
    if zero_point:
        zero = b.const("w_zero", torch.zeros(grid))
    q = b.const("w", stored.to(spec.dtype))
    w = b.call(ops.dequantize, q, b.const("w_scale", torch.rand(grid) + 0.5), zero, str(spec))
    bias = b.const("bias", torch.randn(48).to(float_dtype))
    return optimize(b.done(b.call(aten.linear.default, value, w, bias)))


def convolution(*, x: bool = True, **changes: Any) -> OptimizedGraph:
    """Return a convolution of a quantized or float activation."""
    case = ConvolutionCase(**changes)
    if x:
        return optimize(case.program())
    b = GraphBuilder()
    value = b.arg("x", F32, 2, 6, 9, 8)
    spec = QuantSpec(torch.int8, -8, 7, (1, None, None, None))
    q = b.const("w", stored_like(spec, 10, 6, 3, 3))
    w = b.call(ops.dequantize, q, b.const("w_scale", torch.rand(10, 1, 1, 1)), None, str(spec))
    bias = b.const("bias", torch.randn(10))
    return optimize(b.done(b.call(aten.conv2d.default, value, w, bias)))


def matmul() -> OptimizedGraph:
    """Return a product of two quantized activations."""
    case = Products((2, 3, 64, 64), (2, 3, 70, 64))
    return optimize(case.done(case.product()))


def rowwise(
    kind: str, *, stored: bool = False, residual: bool = False, static: bool = False
) -> OptimizedGraph:
    """Return a norm or activation of 8 by 512 rows of 70 whose result is quantized."""
    b = GraphBuilder()

    def operand(name: str) -> list[Any]:
        x = b.arg(name, torch.int8 if stored else F32, 8, 512, 70)
        if not stored:
            return [x, None, None, ""]
        return [x, b.const(f"{name}_scale", torch.full((1, 1, 1), 0.02)), None, str(STATIC)]

    args = operand("x")
    if kind == "activation":
        args += ["act(silu)|mul(0)", [b.arg("gate", F32, 8, 512, 70)]]
    else:
        args += operand("residual") if residual else [None, None, None, ""]
        vectors = 1 if kind == "rms_norm" else 2
        args += [b.const(f"v{i}", torch.randn(70)) for i in range(vectors)]
        args.append(str(NORM))
    given: list[Any] = [None, None, str(STORED), str(CHOSEN)]
    if static:
        scale = b.const("scale", torch.full((1, 1, 1), 0.03))
        zero = b.const("zero", torch.full((1, 1, 1), 3, dtype=torch.int32))
        given = [scale, zero, str(STATIC), ""]
    node = b.call(getattr(ops, kind), *args, *given, "")
    return b.done(*(b.item(node, i) for i in range(len(node.meta["val"]))), stage=OptimizedGraph)


def image(*, stored: bool) -> OptimizedGraph:
    """Return an activation on channels-last images."""
    b = GraphBuilder()
    whole = (None,) * 4
    x = b.arg("x", torch.uint8 if stored else F32, 2, 64, 30, 30)
    x = b.call(aten.clone.default, x, memory_format=torch.channels_last)
    operands: list[Any] = [x, None, None, ""]
    if stored:
        spec = QuantSpec(torch.uint8, 0, 255, whole)
        operands = [x, b.const("x_scale", torch.full((1,) * 4, 0.02)), None, str(spec)]
    extras = [b.const(f"extra{i}", torch.randn(64, 1, 1)) for i in range(2)]
    scale = b.const("scale", torch.full((1,) * 4, 0.02))
    result = str(QuantSpec(torch.int8, -128, 127, whole))
    steps = "mul(0)|add(1,1.0)"
    node = b.call(ops.activation, *operands, steps, extras, scale, None, result, "", "")
    return b.done(b.item(node, 0), stage=OptimizedGraph)


_X = per_tensor(2)
_BOTH = {
    "dynamic": LinearRowwiseCase(),
    "kept": LinearRowwiseCase(spec=STATIC, choose=None, keep="float"),
    "static": LinearRowwiseCase(spec=STATIC, choose=None),
}

PROGRAMS: dict[str, dict[str, Callable[[], StageGraph]]] = {
    "qfuse.linear_w8a8": {
        "linear": lambda: linear(INT8, x=_X),
        **{name: case.program for name, case in _BOTH.items()},
    },
    "qfuse.linear_w4a8": {
        "linear": lambda: linear(FOUR, x=_X),
        "rows": LinearRowwiseCase(weight=FOUR, k=32).program,
    },
    "qfuse.linear_w8a8_grouped": {"linear": lambda: linear(INT8.with_block((1, 16)), x=_X)},
    "qfuse.linear_w4a16": {
        "integers": lambda: linear(FOUR),
        "float16": lambda: linear(
            replace(FOUR, arithmetic=replace(FOUR.arithmetic, compute=F16)), float_dtype=F16
        ),
    },
    "qfuse.linear_w8a16": {
        "integers": lambda: linear(INT8),
        "offsets": lambda: linear(OFFSETS, zero_point=True),
    },
    "qfuse.linear_w16a32": {"floats": lambda: linear(per_channel(dtype=F16))},
    "aten._int_mm": {"linear": lambda: linear(INT8, x=_X)},
    "aten._weight_int8pack_mm": {"linear": lambda: linear(INT8)},
    "qfuse.convolution_w8a8": {"convolution": convolution},
    "qfuse.convolution_depthwise_w8a8": {"convolution": lambda: convolution(groups=6, out=6)},
    "qfuse.convolution_w8a8_grouped": {
        "convolution": lambda: convolution(shape=(2, 32, 9, 8), block=16)
    },
    "qfuse.convolution_w4a16": {"convolution": lambda: convolution(x=False)},
    "qfuse.convolution_w8a16": {"convolution": lambda: convolution(x=False)},
    "qfuse.matmul_a8a8": {"matmul": matmul},
    "qfuse.rms_norm_quantized": {
        "dynamic": lambda: rowwise("rms_norm", residual=True),
        "static": lambda: rowwise("rms_norm", static=True, stored=True, residual=True),
    },
    "qfuse.layer_norm_quantized": {
        "dynamic": lambda: rowwise("layer_norm", residual=True),
        "static": lambda: rowwise("layer_norm", static=True, stored=True, residual=True),
    },
    "qfuse.activation_quantized": {
        "dynamic": lambda: rowwise("activation"),
        "static": lambda: rowwise("activation", static=True, stored=True),
    },
    "qfuse.image_activation_quantized": {
        "float": lambda: image(stored=False),
        "stored": lambda: image(stored=True),
    },
}
"""Graphs with a problem that the kernel accepts, by its name and by what is special."""
