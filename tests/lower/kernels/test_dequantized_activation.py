"""Products of quantized activations and weights that no int8 kernel takes as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.cases.lowering import NO_KERNELS, dequantized, lowered, pairs, why_not
from tests.support.cases.quantized_convolution import lowered_convolution

from qfuse.ir.events import EXPAND, Exactness, Lowered
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten

pytestmark = pytest.mark.own_kernels

GROUPED = QuantSpec(torch.uint8, 0, 15, (1, 32))
OFFSET = replace(GROUPED, domain=ZeroPointDomain.FLOAT_OFFSET)
INT8 = QuantSpec(torch.int8, -128, 127, (1, None))
BYTE = QuantSpec(torch.int8, -128, 127, (None, None))
SHORT = QuantSpec(torch.int16, -32768, 32767, (None, None))
COLUMNS = QuantSpec(torch.int8, -128, 127, (None, 1))
N, K = 40, 96


def product(activation: QuantSpec, weight: QuantSpec, rows: int = 5) -> NormalGraph:
    """A linear of a quantized input, then a relu."""
    b = GraphBuilder()
    x = b.arg("x", activation.float_dtype, rows, K)
    scale = b.const("x_scale", torch.rand(activation.grid((rows, K))) * 0.01 + 0.02)
    zero = b.const("x_zero", torch.full(activation.grid((rows, K)), 3, dtype=torch.int32))
    quantized = b.call(ops.quantize, x, scale, zero, str(activation))
    real = b.call(ops.dequantize, quantized, scale, zero, str(activation))
    bias = b.const("bias", torch.randn(N).to(activation.float_dtype))
    linear = b.call(
        aten.linear.default, real, dequantized(b, (N, K), weight, zero_point=True), bias
    )
    return b.done(b.call(aten.relu.default, linear))


def product_event(low: LoweredGraph) -> Lowered:
    (event,) = [e for e in low.log.of(Lowered) if e.place.op == "qfuse.linear"]
    return event


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize(
    ("activation", "weight", "kernel"),
    [
        (BYTE, OFFSET, "qfuse.linear_w4a16"),
        (SHORT, GROUPED, "qfuse.linear_w4a16"),
        (SHORT, INT8, "qfuse.linear_w8a16"),
        (COLUMNS, INT8, "qfuse.linear_w8a16"),
    ],
    ids=["offset", "int16", "int16 int8", "per channel"],
)
@pytest.mark.parametrize("real", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_weight_stays_quantized(
    activation: QuantSpec, weight: QuantSpec, kernel: str, real: torch.dtype, rows: int
) -> None:
    specs = [replace(spec, float_dtype=real) for spec in (activation, weight)]
    program = product(specs[0], specs[1], rows)
    low = lowered(program)
    event = product_event(low)

    assert event.kernel == kernel
    assert "the activation is dequantized" in event.why
    assert not [b for b in low.module.buffers() if b.is_floating_point() and b.numel() >= N * K]
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


def test_a_kernel_that_reads_both_comes_first() -> None:
    event = product_event(lowered(product(BYTE, INT8)))

    assert event.kernel == "qfuse.linear_w8a8"
    assert "dequantized" not in event.why


@pytest.mark.numeric
def test_without_any_kernel_it_is_expanded_and_says_why() -> None:
    program = product(BYTE, OFFSET)
    low = lowered(program, NO_KERNELS)
    event = product_event(low)

    assert event.kernel == EXPAND
    assert "activation is quantized" in dict(event.losers)["aten._weight_int8pack_mm"]
    for new, old in pairs(program, low):
        assert torch.equal(new, old)


def test_why_the_int8_kernels_did_not_is_kept() -> None:
    assert "float offset" in why_not(lowered(product(BYTE, OFFSET)), "qfuse.linear_w4a8")


# The weight's shape, the groups, whether it is transposed, and the weight's axis of scales.
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], int, bool, int]] = {
    "depthwise": ((16, 1, 3, 3), 16, False, 0),
    "grouped": ((24, 4, 3, 3), 4, False, 0),
    "transposed": ((16, 24, 3, 3), 1, True, 1),
    "transposed grouped": ((16, 8, 3, 3), 4, True, 1),
    "transposed depthwise": ((16, 1, 3, 3), 16, True, 0),
}
PER_CHANNEL = replace(BYTE, block=(None, 1, None, None))


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize(
    "activation", [replace(SHORT, block=(None,) * 4), PER_CHANNEL], ids=["int16", "per channel"]
)
def test_the_weight_of_a_convolution_stays_quantized(kind: str, activation: QuantSpec) -> None:
    shape, groups, transposed, axis = CONVOLUTIONS[kind]
    b, given = GraphBuilder(), (2, 16, 9, 7)
    x = b.arg("x", torch.float32, *given)
    scale = b.const("x_scale", torch.rand(activation.grid(given)) * 0.01 + 0.02)
    quantized = b.call(ops.quantize, x, scale, None, str(activation))
    real = b.call(ops.dequantize, quantized, scale, None, str(activation))
    spec = replace(INT8, block=tuple(1 if place == axis else None for place in range(4)))
    weight = dequantized(b, shape, spec)
    settings = [2, 2], [1, 1], [1, 1], transposed, [int(transposed)] * 2, groups
    out = b.call(aten.convolution.default, real, weight, None, *settings)
    program = b.done(out)
    low = lowered_convolution(program)
    (event,) = [e for e in low.log.of(Lowered) if e.place.op == "qfuse.convolution"]

    assert event.kernel == "qfuse.convolution_w8a16"
    assert "the activation is dequantized" in event.why
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None
