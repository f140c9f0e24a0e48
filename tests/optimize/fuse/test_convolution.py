from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.convolution import PADDED, Conv
from tests.support.cases.quantized_convolution import OPS
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.convolution import FusedConvolution, as_fused_convolution
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.stages.verify import STAGES, verify_node
from qfuse.optimize.fuse.convolution import FuseConvolution
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor, stored_like
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32 = torch.float32
TRANSPOSED = {
    1: aten.conv_transpose1d.default,
    2: aten.conv_transpose2d.input,
    3: aten.conv_transpose3d.input,
}
SIZES = (6, 5, 4)
KERNEL = (3, 2, 2)


def quantized(b: GraphBuilder, x: Node) -> Node:
    """Add a static quantize and dequantize per tensor."""
    return QuantizedLinear(b, 1, 1).quantized(x, per_tensor(x.meta["val"].dim()))


def weight(b: GraphBuilder, spec: QuantSpec, *shape: int) -> Node:
    """Add a dequantized constant."""
    scale = b.const("w_scale", torch.rand([int(size) for size in spec.grid(shape)]) * 0.1 + 0.01)
    return b.call(ops.dequantize, b.const("w", stored_like(spec, *shape)), scale, None, str(spec))


def fuse(program: NormalGraph, **sizes: int) -> FusedConvolution:
    """Fuse the convolution; values and strides must stay the same."""
    source = clone(program)
    assert apply_rules(program, [FuseConvolution()]).fired == {"fuse-convolution": 1}
    for node in program.graph.nodes:
        verify_node(node, STAGES["optimized"])
    inputs = random_inputs(program, **sizes)
    got, want = run(program, inputs), run(source, inputs)
    assert bits_same(got, want)
    assert [y.stride() for y in got] == [y.stride() for y in want]
    (fused,) = [view for n in program.graph.nodes if (view := as_fused_convolution(n))]
    return fused


def test_golden_both_operands_are_quantized() -> None:
    b = GraphBuilder()
    x = quantized(b, b.arg("x", F32, "m", 4, 6, 5))
    program = b.done(
        Conv(3, per_channel(4), bias=True, settings=([2, 1], [1, 0])).node(b, x, 4, "w")
    )

    fuse(program, m=3)
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 4, 6, 5]
const %x_scale: float32[1, 1, 1, 1]
const %x_zero: int32[1, 1, 1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): int8[s0, 4, 6, 5]
const %w_bias: float32[3]
const %w_s: float32[3, 1, 1, 1]
const %w: int8[3, 4, 3, 2]
%1 = qfuse.convolution(%0, %x_scale, %x_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', %w, %w_s, None, 'int8[-128,127] 1x*x*x* float32 float32:reciprocal:round-zp int', %w_bias, (2, 1), (1, 0), (1, 1), False, (0, 0), 1, None, None, '', '', ()): float32[s0, 3, 3, 4]
return (%1)""",
    )


def test_golden_a_float_activation_gives_a_weight_only_convolution() -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, 4, 6)
    program = b.done(Conv(3, per_channel(3), kernel=(2,)).node(b, x, 4, "w"))

    fused = fuse(program)
    assert fused.x_params is None
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[4, 6]
const %w_s: float32[3, 1, 1]
const %w: int8[3, 4, 2]
%0 = qfuse.convolution(%x, None, None, '', %w, %w_s, None, 'int8[-128,127] 1x*x* float32 float32:reciprocal:round-zp int', None, (1), (0), (1), False, (0), 1, None, None, '', '', ()): float32[3, 5]
return (%0)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("lead", [(), ("m",)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_values_are_the_same_bits(
    spatial: int, lead: tuple[str, ...], transposed: bool, groups: int
) -> None:
    b = GraphBuilder()
    x = quantized(b, b.arg("x", F32, *lead, 4, *SIZES[:spatial]))
    kernel = KERNEL[:spatial]
    if transposed:
        w = weight(b, per_tensor(spatial + 2), 4, 8 // groups, *kernel)
        y = b.call(TRANSPOSED[spatial], x, w, None, [2], [1], [1], groups, [1])
    else:
        w = weight(b, per_channel(spatial + 2), 8, 4 // groups, *kernel)
        y = b.call(OPS[spatial], x, w, None, [2], [1], [2], groups)

    fused = fuse(b.done(y), m=3)
    assert (fused.groups, fused.transposed) == (groups, transposed)
    assert fused.stride == (2,) * spatial
    assert fused.output_padding == (int(transposed),) * spatial


@pytest.mark.numeric
@pytest.mark.parametrize(
    "block",
    [
        (None, None, None, None),
        (1, None, None, None),
        (2, None, None, None),
        (1, 2, None, None),
        (None, 1, None, None),
        (1, 1, 1, 1),
        (None, None, None, 1),
    ],
    ids=str,
)
def test_any_granularity_of_the_weight(block: tuple[int | None, ...]) -> None:
    b = GraphBuilder()
    spec = per_channel(4).with_block(block)
    x = quantized(b, b.arg("x", F32, "m", 4, 6, 5))
    y = b.call(aten.conv2d.default, x, weight(b, spec, 6, 4, 3, 2))

    fused = fuse(b.done(y), m=3)
    assert fused.weight_params is not None
    assert fused.weight_params.spec == spec


@pytest.mark.numeric
@pytest.mark.parametrize(
    "block", [(None, 1, None, None), (1, 1, None, None), (1, None, 1, 1)], ids=str
)
def test_any_granularity_of_the_activation(block: tuple[int | None, ...]) -> None:
    b = GraphBuilder()
    spec = per_tensor(4).with_block(block)
    x = b.arg("x", F32, 2, 4, 6, 5)
    scale = b.const("x_scale", torch.rand([int(s) for s in spec.grid((2, 4, 6, 5))]) * 0.1 + 0.01)
    real = b.call(
        ops.dequantize, b.call(ops.quantize, x, scale, None, str(spec)), scale, None, str(spec)
    )
    y = b.call(aten.conv2d.default, real, weight(b, per_channel(4), 6, 4, 3, 2))

    fused = fuse(b.done(y))
    assert fused.x_params is not None
    assert fused.x_params.spec == spec


@pytest.mark.numeric
@pytest.mark.parametrize("last", ["x", "weight", "both"])
def test_channels_last(last: str) -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, "m", 4, 6, 5)
    if last != "weight":
        x = b.call(aten.clone.default, x, memory_format=torch.channels_last)
    spec = per_channel(4)
    q = stored_like(spec, 6, 4, 3, 2)
    if last != "x":
        q = q.contiguous(memory_format=torch.channels_last)
    scale = b.const("s", torch.rand(6, 1, 1, 1))
    w = b.call(ops.dequantize, b.const("w", q), scale, None, str(spec))
    program = b.done(b.call(aten.conv2d.default, quantized(b, x), w))

    fused = fuse(program, m=3)
    assert fused.node.meta["val"].stride()[1] == 1


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_a_padding_in_words_of_two_equal_sides(padding: str) -> None:
    b = GraphBuilder()
    x = quantized(b, b.arg("x", F32, "m", 4, 6, 5))
    y = b.call(PADDED[2], x, weight(b, per_channel(4), 6, 4, 3, 5), None, [1, 1], padding, [2, 1])

    fused = fuse(b.done(y), m=3)
    assert fused.padding == ((2, 2) if padding == "same" else (0, 0))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_general_op(transposed: bool) -> None:
    b = GraphBuilder()
    x = quantized(b, b.arg("x", F32, "m", 4, 6, 5))
    w = weight(b, per_channel(4), 4, 4, 3, 2)
    y = b.call(aten.convolution.default, x, w, None, [2, 3], [1], [1, 2], transposed, [0], 1)

    fused = fuse(b.done(y), m=3)
    assert (fused.stride, fused.padding, fused.dilation) == ((2, 3), (1, 1), (1, 2))
    assert fused.transposed is transposed


def test_two_users_of_one_dequantize_both_fuse() -> None:
    b = GraphBuilder()
    x = quantized(b, b.arg("x", F32, "m", 4, 6, 5))
    convs = [Conv(n, per_channel(4)).node(b, x, 4, f"w{n}") for n in (3, 5)]
    program = b.done(*convs, x)

    assert apply_rules(program, [FuseConvolution()]).fired == {"fuse-convolution": 2}


def refusal(program: NormalGraph) -> tuple[MissCode, str, str]:
    """Apply the rule, which must refuse and leave the graph alone; return code, node, reason."""
    before = to_text(program.graph)
    result = apply_rules(program, [FuseConvolution()])
    assert not result.modified
    assert to_text(program.graph) == before
    (miss,) = [m for _, m in result.misses]
    return miss.code, miss.at.name, miss.reason


def conv_of(change: Callable[[GraphBuilder, Node], tuple[Node, Node]]) -> tuple[NormalGraph, Node]:
    """A convolution of ``[1, 4, 6, 5]``, and the node that ``change`` says is at fault."""
    b = GraphBuilder()
    x = b.arg("x", F32, 1, 4, 6, 5)
    y, at = change(b, x)
    return b.done(y), at


def _float(b: GraphBuilder, x: Node) -> tuple[Node, Node]:
    w = b.const("w", torch.randn(6, 4, 3, 2))
    return b.call(aten.conv2d.default, x, w), w


def _float_weight(b: GraphBuilder, x: Node) -> tuple[Node, Node]:
    w = b.const("w", torch.randn(6, 4, 3, 2))
    return b.call(aten.conv2d.default, quantized(b, x), w), w


def _depthwise(b: GraphBuilder, x: Node) -> tuple[Node, Node]:
    w = b.const("w", torch.randn(4, 1, 1, 1))
    return b.call(aten.conv2d.default, quantized(b, x), w, groups=4), w


def _to_one_channel(b: GraphBuilder, x: Node) -> tuple[Node, Node]:
    w = b.const("w", torch.randn(4, 1, 1, 1))
    return b.call(aten.conv_transpose2d.input, x, w), w


def _input(b: GraphBuilder, x: Node) -> tuple[Node, Node]:
    q, spec = b.arg("q", torch.int8, 6, 4, 3, 2), per_channel(4)
    w = b.call(ops.dequantize, q, b.const("s", torch.rand(6, 1, 1, 1)), None, str(spec))
    return b.call(aten.conv2d.default, x, w), q


def _uneven(b: GraphBuilder, x: Node) -> tuple[Node, Node]:
    w = weight(b, per_channel(4), 6, 4, 3, 2)
    y = b.call(PADDED[2], x, w, None, [1, 1], "same")
    return y, y


def _run_time(b: GraphBuilder, x: Node) -> tuple[Node, Node]:
    w = weight(b, per_channel(4), 6, 4, 3, 2)
    y = b.call(aten.conv2d.default, x, w, None, [1, 1], [1, 1])
    pad = b.graph.call_function(aten.sym_size.int, (x, 0))
    pad.meta["val"] = 1
    y.prepend(pad)
    y.args = (*y.args[:4], [pad, 1])
    return y, y


# torch 2.15 says so of fake tensors too.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (_float, MissCode.NOT_QUANTIZED, "the weight is not quantized"),
        (_float_weight, MissCode.NOT_QUANTIZED, "the activation is quantized but the weight is"),
        (_depthwise, MissCode.PROFIT, "the weight has one entry per output"),
        (_to_one_channel, MissCode.NOT_QUANTIZED, "the weight is not quantized"),
        (_input, MissCode.NOT_CONSTANT, "the weight is computed at run time"),
        (_uneven, MissCode.ARGUMENT, 'the padding "same" differs on the two sides of an axis'),
        (_run_time, MissCode.ARGUMENT, "its settings are computed at run time"),
    ],
)
def test_refuses(change: Any, code: MissCode, reason: str) -> None:
    program, at = conv_of(change)

    found = refusal(program)
    assert found[:2] == (code, at.name)
    assert found[2].startswith(reason)
