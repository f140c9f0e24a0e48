"""Convolutions of float activations with quantized weights, which are not dequantized in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tests.support.cases.lowering import the_kernel, why_not
from tests.support.cases.quantized_convolution import OPS, TRANSPOSED, lowered_convolution
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.events import Exactness
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import stored_like
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
EIGHT, FOUR = "qfuse.convolution_w8a16", "qfuse.convolution_w4a16"

pytestmark = pytest.mark.own_kernels

CHANNEL = (1, None)
INT8 = QuantSpec(torch.int8, -128, 127, CHANNEL)
GROUPED = INT8.with_block((1, 8))


@dataclass(frozen=True)
class Case:
    """A float input, and a weight in blocks of (output channels, input channels)."""

    shape: tuple[int | str, ...] = (2, 6, 9, 8)
    out: int = 10
    kernel: tuple[int, ...] = (3, 3)
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int = 0
    spec: QuantSpec = INT8
    zero_point: bool = False
    bias: bool = True

    @property
    def weight_shape(self) -> tuple[int, ...]:
        channels = self.shape[-len(self.kernel) - 1]
        assert isinstance(channels, int)
        if self.transposed:
            return (channels, self.out // self.groups, *self.kernel)
        return (self.out, channels // self.groups, *self.kernel)

    @property
    def weight_spec(self) -> QuantSpec:
        features, inputs = self.spec.block
        lead = (inputs, features) if self.transposed else (features, inputs)
        return self.spec.with_block((*lead, *[None] * len(self.kernel)))

    def weight(self, b: GraphBuilder) -> Node:
        spec, shape = self.weight_spec, self.weight_shape
        grid = [int(g) for g in spec.grid(shape)]
        scale = b.const("w_scale", torch.rand(grid) * 0.02 + 1e-3)
        zero = None
        if self.zero_point:
            zero = b.const("w_zero", stored_like(spec, *grid).to(torch.int32))
        return b.call(ops.dequantize, b.const("w", stored_like(spec, *shape)), scale, zero,
                      str(spec))  # fmt: skip

    def add(self, b: GraphBuilder, x: Node) -> Node:
        spatial = len(self.kernel)
        bias = (
            b.const("bias", torch.randn(self.out).to(self.spec.float_dtype)) if self.bias else None
        )
        settings: list[Argument] = [[self.stride] * spatial, [self.padding] * spatial]
        if self.transposed:
            settings += [[self.output_padding] * spatial, self.groups, [self.dilation] * spatial]
            return b.call(TRANSPOSED[spatial], x, self.weight(b), bias, *settings)
        settings += [[self.dilation] * spatial, self.groups]
        return b.call(OPS[spatial], x, self.weight(b), bias, *settings)

    def program(self) -> NormalGraph:
        b = GraphBuilder()
        return b.done(self.add(b, b.arg("x", self.spec.float_dtype, *self.shape)))


CASES = {
    "2d": Case(),
    "1x1": Case(kernel=(1, 1), padding=0),
    "stride and dilation": Case(stride=2, dilation=2),
    "groups": Case(groups=2),
    "1d": Case(shape=(2, 6, 9), kernel=(3,)),
    "3d": Case(shape=(2, 4, 5, 6, 4), kernel=(2, 3, 1)),
    "unbatched": Case(shape=(6, 9, 8)),
    "transposed": Case(transposed=True, stride=2, output_padding=1),
    "transposed groups": Case(transposed=True, stride=3, groups=2, zero_point=True),
    "depthwise": Case(groups=6, out=12),
    "depthwise transposed": Case(groups=6, out=6, transposed=True, stride=2),
    "one scale": Case(spec=INT8.with_block((None, None))),
    "unsigned": Case(spec=QuantSpec(torch.uint8, 0, 255, CHANNEL), zero_point=True),
    "zero points": Case(zero_point=True, bias=False),
    "input groups": Case(shape=(2, 24, 9, 8), spec=GROUPED),
    "input groups of groups": Case(shape=(2, 32, 9, 8), groups=2, spec=GROUPED, zero_point=True),
    "input groups transposed": Case(
        shape=(2, 32, 9, 8), groups=2, spec=GROUPED, zero_point=True, transposed=True, stride=2
    ),
    "one input group per group": Case(shape=(2, 16, 9, 8), groups=2, spec=GROUPED),
    "one scale transposed": Case(
        spec=INT8.with_block((None, None)), transposed=True, groups=2, stride=2
    ),
    "dynamic": Case(shape=("n", 6, "h", "w"), stride=2),
    "empty": Case(shape=(0, 6, 9, 8)),
}


def check(program: NormalGraph, low: LoweredGraph, **sizes: int) -> list[torch.Tensor]:
    """The lowered graph returns what the source does, in its strides."""
    inputs = random_inputs(program, **sizes)
    results = run(low, inputs)
    for new, old in zip(results, run(program, inputs), strict=True):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None
        assert new.stride() == old.stride()
    return list(results)


def calls_of(low: LoweredGraph) -> list[object]:
    return [n.target for n in low.graph.nodes if n.op == "call_function"]


@pytest.mark.numeric
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16])
def test_values(name: str, float_dtype: torch.dtype) -> None:
    case = CASES[name]
    case = replace(case, spec=replace(case.spec, float_dtype=float_dtype))
    program = case.program()
    low = lowered_convolution(program)

    assert the_kernel(low) == EIGHT
    named = {size: 5 + 2 * i for i, size in enumerate(case.shape) if isinstance(size, str)}
    check(program, low, **named)


@pytest.mark.numeric
@pytest.mark.parametrize("name", CASES)
def test_values_of_four_bits(name: str) -> None:
    case = CASES[name]
    low, high = (0, 15) if case.spec.dtype is torch.uint8 else (-8, 7)
    case = replace(case, spec=replace(case.spec, quant_min=low, quant_max=high))
    program = case.program()
    lowered = lowered_convolution(program)

    assert the_kernel(lowered) == FOUR
    named = {size: 5 + 2 * i for i, size in enumerate(case.shape) if isinstance(size, str)}
    check(program, lowered, **named)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_weight_stays_packed(bits: int) -> None:
    spec = INT8 if bits == 8 else replace(INT8, quant_min=-8, quant_max=7)
    case = Case(shape=(1, 64, 8, 8), out=128, spec=spec)
    low = lowered_convolution(case.program())

    sizes = [t.numel() * t.element_size() for t in low.module.buffers()]
    assert sum(sizes) <= 128 * 64 * 9 * bits // 8 + 2 * 4 * 128


@pytest.mark.parametrize("groups", [4, 16, 64])
def test_groups_of_few_channels_fill_no_blocks_up(groups: int) -> None:
    case = Case(shape=(1, 64, 8, 8), out=64, groups=groups)
    low = lowered_convolution(case.program())

    sizes = [t.numel() * t.element_size() for t in low.module.buffers()]
    depth = -(-9 * 64 // groups // 4) * 4
    assert sum(sizes) <= 64 * depth + 2 * 4 * 64


@pytest.mark.numeric
def test_the_epilogue_is_in_the_kernel() -> None:
    b = GraphBuilder()
    case = Case()
    y = case.add(b, b.arg("x", torch.float32, *case.shape))
    other = b.arg("r", torch.float32, *y.meta["val"].shape)
    program = b.done(b.call(aten.relu.default, b.call(aten.add.Tensor, y, other)))
    low = lowered_convolution(program)

    calls = [call for call in calls_of(low) if "clone" not in str(call)]
    assert calls == [torch.ops.qfuse.convolution_w8a16.default]
    check(program, low)


@pytest.mark.numeric
def test_a_quantized_result_is_quantized_after_the_kernel() -> None:
    b = GraphBuilder()
    case = Case()
    y = case.add(b, b.arg("x", torch.float32, *case.shape))
    scale = b.const("o", torch.full((1, 1, 1, 1), 0.1))
    spec = QuantSpec(torch.int8, -128, 127, (None,) * 4)
    program = b.done(b.call(ops.quantize, y, scale, None, str(spec)))
    low = lowered_convolution(program)

    assert the_kernel(low) == EIGHT
    check(program, low)


@pytest.mark.numeric
def test_convolutions_in_a_row_are_channels_last_together() -> None:
    b = GraphBuilder()
    case = Case(shape=(2, 16, 20, 20), out=16)
    y = b.arg("x", torch.float32, *case.shape)
    for _ in range(3):
        y = b.call(aten.relu.default, replace(case).add(b, y))
    program = b.done(y)
    low = lowered_convolution(program)

    copies = [call for call in calls_of(low) if call is aten.clone.default]
    assert len(copies) == 2
    check(program, low)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (
            Case(spec=INT8.with_block((1, 3))),
            "blocks of 1x3x*x*, not per output channel or in groups of a multiple of 8",
        ),
        (Case(shape=(2, 24, 9, 8), spec=INT8.with_block((1, 16))), "blocks of 1x16x*x*"),
        (Case(spec=INT8.with_block((2, None))), "blocks of 2x*x*x*"),
        (Case(spec=QuantSpec(torch.int16, -900, 900, CHANNEL)), "stored as torch.int16"),
        (
            Case(
                spec=QuantSpec(torch.float16, -65504, 65504, CHANNEL, domain=ZeroPointDomain.NONE)
            ),
            "stored as torch.float16",
        ),
        (Case(spec=replace(INT8, arithmetic=Arithmetic(torch.float64))), "dequantized in float64"),
        (Case(spec=replace(INT8, float_dtype=torch.float64)), "computes in torch.float64"),
    ],
)
def test_refuses(case: Case, reason: str) -> None:
    program = case.program()
    low = lowered_convolution(program)

    assert reason in why_not(low, EIGHT)
    check(program, low)


def test_refuses_weights_that_do_not_fit_four_bits() -> None:
    low = lowered_convolution(Case().program())

    assert "span more than 15" in why_not(low, FOUR)


def test_refuses_a_quantized_activation() -> None:
    b = GraphBuilder()
    case = Case()
    scale = b.const("x_scale", torch.full((1, 1, 1, 1), 0.05))
    spec = QuantSpec(torch.int8, -128, 127, (None,) * 4)
    q = b.call(ops.quantize, b.arg("x", torch.float32, *case.shape), scale, None, str(spec))
    y = case.add(b, b.call(ops.dequantize, q, scale, None, str(spec)))
    low = lowered_convolution(b.done(y))

    assert why_not(low, EIGHT) == "the activation is quantized"


def test_refuses_a_weight_that_is_computed() -> None:
    b = GraphBuilder()
    case = Case()
    q = b.const("q", torch.ones(*case.weight_shape, dtype=torch.int8))
    w = b.call(ops.dequantize, q, b.arg("s", torch.float32, 10, 1, 1, 1), None,
               str(case.weight_spec))  # fmt: skip
    low = lowered_convolution(
        b.done(b.call(aten.conv2d.default, b.arg("x", torch.float32, *case.shape), w, None))
    )

    assert why_not(low, EIGHT) == "the weight or its parameters are computed at run time"
