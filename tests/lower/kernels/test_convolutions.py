"""Quantized convolutions of a source graph, on the kernels that the lowering chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.cases.lowering import the_kernel, why_not
from tests.support.cases.quantized_convolution import (
    ConvolutionCase,
    lowered_convolution,
    spec_of,
)

from qfuse.ir.events import Exactness, Left, Lowered
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_tensor
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
GENERAL = "qfuse.convolution_w8a8"
DEPTHWISE = "qfuse.convolution_depthwise_w8a8"

pytestmark = pytest.mark.own_kernels

CASES = {
    "2d": ConvolutionCase(),
    "1x1": ConvolutionCase(kernel=(1, 1), padding=0),
    "stride": ConvolutionCase(stride=2),
    "dilation": ConvolutionCase(dilation=2, padding=3),
    "groups": ConvolutionCase(groups=2),
    "1d": ConvolutionCase(shape=(2, 6, 9), kernel=(3,)),
    "3d": ConvolutionCase(shape=(2, 4, 5, 6, 4), kernel=(2, 3, 1)),
    "unbatched": ConvolutionCase(shape=(6, 9, 8)),
    "transposed": ConvolutionCase(transposed=True, stride=2, axis=1, output_padding=1),
    "transposed groups": ConvolutionCase(transposed=True, stride=3, groups=2, axis=1),
    "signed": ConvolutionCase(x=torch.int8, zero=-7),
    "one scale": ConvolutionCase(axis=None),
    "unsigned weight": ConvolutionCase(weight=torch.uint8, weight_zero=120),
    "weight zero points": ConvolutionCase(weight_zero=-3),
    "no bias": ConvolutionCase(bias=False),
    "depthwise": ConvolutionCase(groups=6, out=6),
    "depthwise stride": ConvolutionCase(groups=6, out=6, stride=2, kernel=(5, 5), padding=2),
    "depthwise multiplier": ConvolutionCase(groups=6, out=12, x=torch.int8, zero=3),
    "depthwise 1d": ConvolutionCase(shape=(2, 70, 9), kernel=(3,), groups=70, out=70),
    "depthwise 3d": ConvolutionCase(
        shape=(2, 6, 5, 6, 4), kernel=(2, 3, 1), groups=6, out=6, weight_zero=-3
    ),
    "depthwise dynamic": ConvolutionCase(shape=("n", 6, "h", "w"), groups=6, out=6, dilation=2),
    "one channel": ConvolutionCase(shape=(2, 1, 9, 8)),
    "dynamic batch": ConvolutionCase(shape=("n", 6, 9, 8)),
    "dynamic sizes": ConvolutionCase(shape=("n", 6, "h", "w"), stride=2),
    "empty": ConvolutionCase(shape=(0, 6, 9, 8)),
}


def check(program: NormalGraph, low: LoweredGraph, **sizes: int) -> list[torch.Tensor]:
    """The lowered graph returns what the source does, in its strides."""
    inputs = random_inputs(program, **sizes)
    results = run(low, inputs)
    for new, old in zip(results, run(program, inputs), strict=True):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None
        assert new.stride() == old.stride()
    return list(results)


@pytest.mark.numeric
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    case = CASES[name]
    program = case.program()
    low = lowered_convolution(program)

    depthwise = case.groups == case.channels > 1
    assert the_kernel(low) == (DEPTHWISE if depthwise else GENERAL)
    named = {size: 5 + 2 * i for i, size in enumerate(case.shape) if isinstance(size, str)}
    check(program, low, **named)


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["2d", "1x1", "transposed", "dynamic batch"])
@pytest.mark.parametrize("out", [torch.int8, torch.uint8])
def test_epilogue_and_quantized_output_are_in_the_kernel(name: str, out: torch.dtype) -> None:
    case = CASES[name]
    b = GraphBuilder()
    y = case.add(b, b.arg("x", torch.float32, *case.shape))
    shape = y.meta["val"].shape
    lead = "n" if name == "dynamic batch" else 2
    other = b.arg("r", torch.float32, lead, *shape[1:])
    y = b.call(aten.relu.default, b.call(aten.add.Tensor, y, other, alpha=0.5))
    spec = replace(spec_of(4, out), quant_min=3, quant_max=100)
    grid = b.const("o", torch.full((1, 1, 1, 1), 0.1))
    program = b.done(b.call(ops.quantize, y, grid, None, str(spec)))
    low = lowered_convolution(program)

    calls = [n.target for n in low.graph.nodes if n.op == "call_function"]
    assert torch.ops.qfuse.convolution_w8a8_quantized.default in calls
    assert aten.relu.default not in calls
    (made,) = check(program, low, n=3)
    assert made.min() + 2 < made.max()


@pytest.mark.numeric
def test_the_steps_that_no_kernel_knows_follow_the_kernel() -> None:
    b = GraphBuilder()
    case = ConvolutionCase()
    y = case.add(b, b.arg("x", torch.float32, *case.shape))
    y = b.call(aten.relu.default, b.call(aten.softplus.default, b.call(aten.relu.default, y)))
    program = b.done(y)
    low = lowered_convolution(program)

    calls = [n.target for n in low.graph.nodes if n.op == "call_function"]
    assert torch.ops.qfuse.convolution_w8a8.default in calls
    assert aten.softplus.default in calls
    check(program, low)


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["2d", "stride", "groups", "depthwise stride", "signed"])
def test_an_uneven_padding_is_in_the_kernel(name: str) -> None:
    case = CASES[name]
    b = GraphBuilder()
    x = b.arg("x", torch.float32, *case.shape)
    y = case.add(b, b.call(aten.constant_pad_nd.default, x, [0, 1, 2, 0], 0.0))
    program = b.done(y)
    low = lowered_convolution(program)

    assert aten.constant_pad_nd.default not in calls_of(low)
    check(program, low)


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        (ConvolutionCase(shape=(1, 64, 8, 8), out=64, groups=16), 4),
        (ConvolutionCase(shape=(1, 64, 8, 8), out=64, groups=4), 4),
        (ConvolutionCase(shape=(1, 64, 8, 8), out=64, groups=64, transposed=True, axis=1), 4),
    ],
)
def test_groups_of_few_channels_are_merged(case: ConvolutionCase, groups: int) -> None:
    for weight_zero in (None, 5):
        program = case.but(weight_zero=weight_zero).program()
        low = lowered_convolution(program)

        (call,) = [
            n for n in low.graph.nodes if n.target is torch.ops.qfuse.convolution_w8a8.default
        ]
        assert call.args[14] == groups
        check(program, low)


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["2d", "depthwise", "dynamic batch"])
@pytest.mark.parametrize("act", ["elu", "selu", "celu", "mish", "prelu", "one slope"])
def test_activations_are_in_the_kernel(name: str, act: str) -> None:
    b = GraphBuilder()
    case = CASES[name]
    y = case.add(b, b.arg("x", torch.float32, *case.shape))
    if act in {"prelu", "one slope"}:
        slopes = torch.randn(case.out if act == "prelu" else 1)
        y = b.call(aten.prelu.default, y, b.const("slopes", slopes))
    else:
        y = b.call(getattr(aten, act).default, y)
    program = b.done(y)
    low = lowered_convolution(program)

    assert str(calls_of(low)[-1]).startswith("qfuse.convolution")
    check(program, low, n=3)


@pytest.mark.numeric
def test_a_channels_last_input_gives_a_channels_last_result() -> None:
    case = ConvolutionCase()
    program = case.program()
    low = lowered_convolution(program)
    x = torch.randn(2, 6, 9, 8).contiguous(memory_format=torch.channels_last)

    (y,), (expected,) = run(low, [x]), run(program, [x])
    assert compare(y, expected, None, Exactness.ROUNDING, SITE).wrong is None


def refused(case: ConvolutionCase) -> str:
    """Return why the kernel does not take a case, whose values must stay."""
    program = case.program()
    low = lowered_convolution(program)
    check(program, low)
    return why_not(low, GENERAL)


def test_refuses_scales_along_the_input_channels() -> None:
    assert refused(ConvolutionCase(axis=1)) == (
        "the weight's scales run along the input channels, one each: "
        "kernels take one per output channel"
    )


def test_refuses_a_zero_point_outside_of_the_range() -> None:
    assert "zero point" in refused(ConvolutionCase(zero=300))


def test_refuses_sums_that_could_overflow() -> None:
    case = ConvolutionCase(shape=(1, 1 << 13, 3, 3), out=1, padding=0)
    low = lowered_convolution(case.program())

    assert "of 73728 products could overflow" in why_not(low, GENERAL)


def test_refuses_an_activation_per_channel() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 6, 9, 8)
    spec = QuantSpec(torch.int8, -128, 127, (None, 1, None, None))
    scale = b.const("s", torch.rand(1, 6, 1, 1) * 0.1 + 0.01)
    q = b.call(ops.quantize, x, scale, None, str(spec))
    real = b.call(ops.dequantize, q, scale, None, str(spec))
    y = b.call(aten.conv2d.default, real, ConvolutionCase().stored(b), None)
    program = b.done(y)
    low = lowered_convolution(program)

    assert "not per tensor" in why_not(low, GENERAL)
    check(program, low)


def test_the_report_says_what_is_computed() -> None:
    low = lowered_convolution(ConvolutionCase(stride=2, groups=2).program())
    (event,) = low.log.of(Lowered)

    assert event.what == (
        "uint8 per-tensor asymmetric x int8 per-channel [10, 3, 3, 3], stride 2, padding 1, "
        "2 groups"
    )


def calls_of(low: LoweredGraph) -> list[object]:
    """Return the ops that are called, without views."""
    return [n.target for n in low.graph.nodes if n.op == "call_function"]


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["2d", "1x1", "depthwise", "channels last"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_residual_is_read_as_it_is_stored(name: str, dtype: torch.dtype) -> None:
    case = CASES.get(name, ConvolutionCase(kernel=(1, 1), padding=0))
    b = GraphBuilder()
    y = case.add(b, b.arg("x", torch.float32, *case.shape))
    r = b.arg("r", dtype, *y.meta["val"].shape)
    scale = b.const("r_scale", torch.full((1, 1, 1, 1), 0.03))
    zero = b.const("r_zero", torch.full((1, 1, 1, 1), 17, dtype=torch.int32))
    other = b.call(ops.dequantize, r, scale, zero, str(spec_of(4, dtype)))
    y = b.call(aten.relu.default, b.call(aten.add.Tensor, y, other, alpha=-0.5))
    out = b.const("o", torch.full((1, 1, 1, 1), 0.05))
    program = b.done(b.call(ops.quantize, y, out, None, str(spec_of(4, torch.uint8))))
    low = lowered_convolution(program)

    assert len([call for call in calls_of(low) if str(call).startswith("qfuse.")]) == 1
    (made,) = check(program, low)
    assert made.min() + 2 < made.max()


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(2, 10, 1, 1), (1, 10, 1, 1), (10, 1, 1)])
@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.add.Tensor])
def test_a_value_per_channel_is_in_the_kernel(
    shape: tuple[int, ...], op: torch._ops.OpOverload
) -> None:
    case = ConvolutionCase()
    b = GraphBuilder()
    y = case.add(b, b.arg("x", torch.float32, *case.shape))
    program = b.done(b.call(op, y, b.arg("g", torch.float32, *shape)))
    low = lowered_convolution(program)

    assert calls_of(low)[-1] is torch.ops.qfuse.convolution_w8a8.default
    check(program, low)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", ["convolution", "linear"])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_result_that_is_quantized_twice_is_computed_once(kind: str, leaves: bool) -> None:
    """As in a U-Net, where one result goes down and across with parameters of its own."""
    b = GraphBuilder()
    if kind == "linear":
        block = QuantizedLinear(b, 40, 24)
        x = b.arg("x", torch.float32, 5, 24)
        y = block.linear(block.quantized(x, per_tensor(2)))
    else:
        case = ConvolutionCase()
        y = case.add(b, b.arg("x", torch.float32, *case.shape))
    y = b.call(aten.relu.default, y)
    rank = y.meta["val"].dim()
    made = []
    for name, scale, dtype in (("a", 0.05, torch.uint8), ("b", 0.11, torch.int8)):
        grid = b.const(name, torch.full((1,) * rank, scale))
        made.append(b.call(ops.quantize, y, grid, None, str(spec_of(rank, dtype))))
    program = b.done(*made, *([y] if leaves else []))
    low = lowered_convolution(program)

    assert len([call for call in calls_of(low) if str(call).startswith("qfuse.")]) == 1
    assert aten.relu.default not in calls_of(low)
    reasons = [event.reason.partition(";")[0] for event in low.log.of(Left)]
    assert reasons.count(f"qfuse.{kind} has other users besides this quantize") == len(made)
    check(program, low)


def residual(zero: torch.Tensor) -> NormalGraph:
    """A linear plus a dequantized residual with this zero point."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 5, 24)
    block = QuantizedLinear(b, 40, 24)
    y = block.linear(block.quantized(x, per_tensor(2)))
    r = b.arg("r", torch.int8, 5, 40)
    scale = b.const("r_scale", torch.full((1, 1), 0.03))
    other = b.call(ops.dequantize, r, scale, b.const("r_zero", zero), str(per_tensor(2)))
    return b.done(b.call(aten.add.Tensor, y, other))


@pytest.mark.numeric
def test_a_linear_reads_a_stored_residual() -> None:
    program = residual(torch.full((1, 1), -9, dtype=torch.int32))
    low = lowered_convolution(program)

    assert calls_of(low)[-1] is torch.ops.qfuse.linear_w8a8.default
    check(program, low)


GROUPED = {
    "2d": ConvolutionCase(shape=(2, 32, 9, 8)),
    "1d": ConvolutionCase(shape=(2, 32, 9), kernel=(3,), x=torch.int8, zero=-7),
    "groups": ConvolutionCase(shape=(2, 32, 9, 8), groups=2, stride=2),
    "transposed": ConvolutionCase(shape=(2, 32, 9, 8), transposed=True, stride=2, groups=2),
    "dynamic": ConvolutionCase(shape=("n", 32, "h", "w")),
    # 128 stands for 0, so these are int8 values without zero points.
    "unsigned": ConvolutionCase(shape=(2, 32, 9, 8), weight=torch.uint8, weight_zero=128),
    "unsigned transposed": ConvolutionCase(
        shape=(2, 32, 9, 8), transposed=True, weight=torch.uint8, weight_zero=128
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", GROUPED)
def test_scales_in_groups_of_input_channels(name: str) -> None:
    case = GROUPED[name].but(block=8)
    program = case.program()
    low = lowered_convolution(program)

    assert the_kernel(low) == "qfuse.convolution_w8a8_grouped"
    named = {size: 5 + 2 * i for i, size in enumerate(case.shape) if isinstance(size, str)}
    check(program, low, **named)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (ConvolutionCase(shape=(2, 24, 9, 8), block=4), "blocks of 1x4x*x*, not per output"),
        (ConvolutionCase(shape=(2, 32, 9, 8), block=8, weight_zero=3), "has zero points"),
        (
            ConvolutionCase(shape=(2, 32, 9, 8), block=8, weight=torch.uint8, weight_zero=127),
            "has zero points",
        ),
        (ConvolutionCase(shape=(2, 32, 9, 8), block=8, weight=torch.uint8), "has zero points"),
        (ConvolutionCase(), "scales are not grouped"),
    ],
)
def test_refuses_other_groups(case: ConvolutionCase, reason: str) -> None:
    low = lowered_convolution(case.program())

    assert reason in why_not(low, "qfuse.convolution_w8a8_grouped")


@pytest.mark.numeric
def test_a_residual_with_a_fractional_zero_point_is_not_read_as_it_is_stored() -> None:
    program = residual(torch.full((1, 1), 2.5))
    low = lowered_convolution(program)

    assert calls_of(low)[-1] is not torch.ops.qfuse.linear_w8a8.default
    check(program, low)


@pytest.mark.numeric
def test_an_unbatched_image_keeps_the_strides_of_adjacent_channels() -> None:
    case = ConvolutionCase(shape=(6, 9, 8))
    b = GraphBuilder()
    x = b.call(aten.permute.default, b.arg("x", torch.float32, 9, 8, 6), [2, 0, 1])
    y = case.add(b, x)
    program = b.done(
        b.call(aten.view.default, b.call(aten.permute.default, y, [1, 2, 0]), [72, 10])
    )
    low = lowered_convolution(program)

    assert the_kernel(low) == GENERAL
    check(program, low)
