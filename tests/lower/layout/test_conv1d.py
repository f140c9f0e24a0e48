from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import CLAIM_META, LoweredGraph, OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.sizes import same_strides
from qfuse.lower import lower
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run

aten = torch.ops.aten
BF16 = torch.bfloat16
PLAIN = Target.for_testing()
AMX = replace(PLAIN, features=PLAIN.features | {"amx_bf16", "amx_int8", "amx_tile"})


CASES = ("floats", "run time", "groups", "uneven", "transposed", "unbatched", "claimed")


def lowered(program: OptimizedGraph, target: Target = PLAIN) -> LoweredGraph:
    return lower(clone(program), target, CostModel(CostProfile.pinned()), ())


def of_images(program: LoweredGraph) -> list[Node]:
    return [node for node in program.graph.nodes if is_call(node, aten.conv2d.default)]


def weight(b: GraphBuilder, *shape: int, dtype: torch.dtype = BF16) -> Node:
    return b.const("weight", torch.randn(shape, dtype=dtype))


def test_golden_a_sequence_is_an_image_of_one_row() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", BF16, "n", 4, 20), weight(b, 6, 4, 3)
    y = b.call(aten.conv1d.default, x, w, b.const("bias", torch.randn(6, dtype=BF16)), [2], [1])

    assert_expected_inline(
        to_text(lowered(b.done(y, stage=OptimizedGraph)).graph),
        """\
%x: bfloat16[s0, 4, 20]
const %bias: bfloat16[6]
%0 = aten.unsqueeze(%x, 2): bfloat16[s0, 4, 1, 20]
%1 = aten.clone(%0, memory_format=torch.channels_last): bfloat16[s0, 4, 1, 20]
const %weight_channels_last: bfloat16[6, 4, 1, 3]
%2 = aten.conv2d(%1, %weight_channels_last, %bias, (1, 2), (0, 1), (1, 1), 1): bfloat16[s0, 6, 1, 10]
%3 = aten.squeeze.dim(%2, 2): bfloat16[s0, 6, 10]
%4 = aten.clone(%3, memory_format=torch.contiguous_format): bfloat16[s0, 6, 10]
return (%4)""",
    )


@pytest.mark.parametrize("case", CASES)
def test_refuses_other_convolutions(case: str) -> None:
    b = GraphBuilder()
    dtype = torch.float32 if case == "floats" else BF16
    x, w = b.arg("x", dtype, 2, 4, 20), weight(b, 4, 4, 3, dtype=dtype)
    if case == "run time":
        y = b.call(aten.conv1d.default, x, b.arg("w", dtype, 4, 4, 3))
    elif case == "groups":
        depthwise = b.const("depthwise", torch.randn(4, 1, 3, dtype=dtype))
        y = b.call(aten.conv1d.default, x, depthwise, None, [1], [1], [1], 4)
    elif case == "uneven":
        even = b.const("even", torch.randn(4, 4, 2, dtype=dtype))
        y = b.call(aten.conv1d.padding, x, even, None, [1], "same")
    elif case == "transposed":
        y = b.call(aten.conv_transpose1d.default, x, w)
    elif case == "unbatched":
        y = b.call(aten.conv1d.default, b.arg("one", dtype, 4, 20), w)
    else:
        y = b.call(aten.conv1d.default, x, w)
    if case == "claimed":
        y.meta[CLAIM_META] = "npu"
    program = b.done(y, stage=OptimizedGraph)
    before = [node.target for node in program.graph.nodes if node.op == "call_function"]

    after = [n.target for n in lowered(program).graph.nodes if n.op == "call_function"]

    assert after == before


@pytest.mark.parametrize("limit", ["", "AVX512_CORE_BF16"])
def test_groups_are_convolved_as_images_where_onednn_uses_amx(limit: str) -> None:
    b = GraphBuilder()
    x, w = b.arg("x", BF16, 2, 4, 20), weight(b, 8, 1, 3)
    y = b.call(aten.conv1d.default, x, w, None, [1], [1], [1], 4)
    program = b.done(y, stage=OptimizedGraph)
    target = replace(AMX, onednn_isa_limit=limit)

    assert bool(of_images(lowered(program, target))) is (not limit)


def test_convolutions_that_share_a_weight_share_its_copy() -> None:
    b = GraphBuilder()
    w = weight(b, 4, 4, 3)
    first = b.call(aten.conv1d.default, b.arg("x", BF16, 2, 4, 20), w, None, [1], [1])
    y = b.call(aten.conv1d.default, b.call(aten.relu.default, first), w, None, [1], [1])
    low = lowered(b.done(y, stage=OptimizedGraph))

    assert len(of_images(low)) == 2
    held = dict(low.module.named_buffers())
    assert [tuple(t.shape) for t in held.values()] == [(4, 4, 1, 3)]
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in held.values())


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("sizes", "kernel", "settings"),
    [
        ((2, 5, 33), (7, 5, 3), ([1], [1], [1], 1)),
        ((1, 1, 40), (6, 1, 10), ([5], [0], [1], 1)),
        ((3, 8, 9), (4, 8, 1), ([1], [2], [1], 1)),
        ((1, 6, 50), (8, 6, 5), ([3], [8], [4], 1)),
        ((2, 8, 1), (12, 4, 3), ([1], [1], [1], 2)),
        ((2, 6, 17), (12, 1, 4), ([2], [3], [1], 6)),
        ((0, 6, 17), (4, 6, 4), ([2], [3], [1], 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("turned", [False, True])
def test_values_and_strides_are_those_of_the_sequence(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    settings: tuple[list[int], list[int], list[int], int],
    turned: bool,
) -> None:
    b = GraphBuilder()
    w, bias = weight(b, *kernel), b.const("bias", torch.randn(kernel[0], dtype=BF16))
    n, channels, length = sizes
    if turned:
        source = torch.randn(n, length, channels, dtype=BF16)
        x = b.call(aten.transpose.int, b.arg("x", BF16, *source.shape), 1, 2)
    else:
        source = torch.randn(sizes, dtype=BF16)
        x = b.arg("x", BF16, *sizes)
    y = b.call(aten.conv1d.default, x, w, bias, *settings)
    program = b.done(y, stage=OptimizedGraph)
    low = lowered(program, AMX)

    (new,), (old,) = run(low, [source]), run(program, [source])

    assert len(of_images(low)) == 1
    assert (new.dtype, new.shape) == (old.dtype, old.shape)
    assert same_strides(new, old)
    # Sums in float32 of another order, then rounded to bfloat16.
    torch.testing.assert_close(new, old, rtol=2**-7, atol=1e-4)
