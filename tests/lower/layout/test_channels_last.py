from __future__ import annotations

import pytest
import torch
from tests.support.cases.convolution_regions import ConvolutionBoard
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import EXPAND, FLOAT, Estimated, Lowered
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.kernels import KernelLibrary
from qfuse.lower.kernels.registry import all_kernels
from qfuse.lower.layout.assign import assign_channels_last
from qfuse.lower.lower import lower
from qfuse.lower.measure.wishes import Wishes
from qfuse.lower.select.context import LoweringContext
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.rewriter import origins
from qfuse.rewrite.session import RewriteSession
from qfuse.targets import Target
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
BUILT = KernelLibrary(available=True, reason="")


def assigned(program: OptimizedGraph, library: KernelLibrary = BUILT) -> OptimizedGraph:
    """Assign layouts to a copy for a pinned machine."""
    program = clone(program)
    session = RewriteSession(program, RewriteContext("lower"))
    cost = CostModel(CostProfile.pinned())
    assign_channels_last(LoweringContext(session, Target.for_testing(), cost, all_kernels(library)))
    return program


def copies(program: OptimizedGraph) -> list[torch.memory_format]:
    """Return the formats of all copies, in order."""
    found = program.graph.find_nodes(op="call_function", target=aten.clone.default)
    return [node.kwargs["memory_format"] for node in found]


def strides_of(program: OptimizedGraph) -> list[tuple[int, ...]]:
    """Return the strides of the convolutions."""
    found = program.graph.find_nodes(op="call_function", target=ops.convolution)
    return [node.meta["val"].stride() for node in found]


def check(source: OptimizedGraph, made: OptimizedGraph, **sizes: int) -> None:
    """Values stay, and so do the strides of all results."""
    inputs = random_inputs(source, **sizes)
    for old, new in zip(run(source, inputs), run(made, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-4)
        assert new.stride() == old.stride()


def residual(board: ConvolutionBoard, x: Node) -> Node:
    y = board.conv(board.quantize(x))
    z = board.conv(y, quantized=False)
    total = board.call(aten.add.Tensor, z, board.dequantize(y))
    return board.call(aten.relu.default, total)


def test_a_chain_is_copied_only_where_it_begins_and_ends() -> None:
    board = ConvolutionBoard()
    program = board.done(residual(board, board.image()))
    made = assigned(program)

    assert copies(made) == [torch.channels_last, torch.contiguous_format]
    assert all(strides[1] == 1 for strides in strides_of(made))
    check(program, made, n=3)


@pytest.mark.own_kernels
def test_events_before_and_after_name_the_same_op() -> None:
    """Otherwise the report does not know that the convolutions run on kernels."""
    board = ConvolutionBoard()
    program = board.done(residual(board, board.image()))
    names = {n.name for n in program.graph.find_nodes(op="call_function", target=ops.convolution)}
    cost = CostModel(CostProfile.pinned())
    made = lower(clone(program), Target.for_testing(), cost, all_kernels(BUILT))

    lowered = [e for e in made.log.of(Lowered) if e.kernel != EXPAND]
    assert {e.place.node for e in made.log.of(Estimated) if e.multiply_adds} == names
    assert {e.place.node for e in lowered} == names
    # As in a plan, which forces a kernel by the name of the op in the optimized graph.
    for kernel in (EXPAND, FLOAT):
        wishes = Wishes(dict.fromkeys(names, kernel))
        made = lower(clone(program), Target.for_testing(), cost, all_kernels(BUILT), wishes=wishes)
        assert {e.kernel for e in made.log.of(Lowered)} == {kernel}
        assert {e.place.node for e in made.log.of(Lowered)} == names


def test_dynamic_sizes_stay_dynamic() -> None:
    board = ConvolutionBoard()
    program = board.done(residual(board, board.image("n", "h", "h")))
    made = assigned(program)

    assert len(copies(made)) == 2
    check(program, made, n=2, h=9)


def test_a_reduction_reads_any_layout() -> None:
    board = ConvolutionBoard()
    pooled = board.call(aten.mean.dim, residual(board, board.image()), [2, 3])
    made = assigned(board.done(pooled))

    assert copies(made) == [torch.channels_last]


@pytest.mark.parametrize("op", [aten.max_pool2d.default, aten.avg_pool2d.default])
def test_pools_stay_in_the_region(op: torch._ops.OpOverload) -> None:
    board = ConvolutionBoard()
    y = board.dequantize(board.conv(board.quantize(board.image())))
    pooled = board.call(op, y, [2, 2])
    program = board.done(board.conv(board.quantize(pooled), quantized=False))
    made = assigned(program)

    assert copies(made) == [torch.channels_last, torch.contiguous_format]
    check(program, made, n=2)


def test_a_batch_norm_stays_in_the_region() -> None:
    """Its statistics are results without pixels."""
    board = ConvolutionBoard()
    y = board.dequantize(board.conv(board.quantize(board.image())))
    scale, shift = (board.b.const(name, torch.rand(8) + 0.5) for name in ("scale", "shift"))
    op = aten._native_batch_norm_legit_no_training.default
    norm = board.call(op, y, scale, shift, shift, scale, 0.1, 1e-5)
    z = board.conv(board.quantize(board.b.item(norm, 0)), quantized=False)
    program = board.done(z)
    made = assigned(program)

    assert copies(made) == [torch.channels_last, torch.contiguous_format]
    check(program, made, n=2)


def test_parts_of_a_split_and_their_join_stay_in_the_region() -> None:
    board = ConvolutionBoard()
    y = board.conv(board.quantize(board.image()))
    parts = board.call(aten.split.Tensor, y, 4, 1)
    left, right = board.b.item(parts, 0), board.b.item(parts, 1)
    joined = board.call(aten.cat.default, [board.conv(left), right], 1)
    program = board.done(board.conv(joined, quantized=False))
    made = assigned(program)

    assert copies(made) == [torch.channels_last, torch.contiguous_format]
    check(program, made, n=2)


def shuffled(board: ConvolutionBoard, x: Node, groups: int, *, dense: bool = True) -> Node:
    """Swap the groups of the channels of ``x`` with the channels of a group, as networks do."""
    sizes = [board.call(aten.sym_size.int, x, 0), *x.meta["val"].shape[1:]]
    channels = sizes[1]
    parted = board.call(aten.view.default, x, [sizes[0], groups, channels // groups, *sizes[2:]])
    turned = board.call(aten.transpose.int, parted, 1, 2)
    if not dense:
        return board.call(aten.reshape.default, turned, sizes)
    whole = board.b.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return board.call(aten.view.default, whole, sizes)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_channel_shuffle_stays_in_the_region(groups: int, dense: bool) -> None:
    board = ConvolutionBoard()
    y = shuffled(board, board.conv(board.quantize(board.image())), groups, dense=dense)
    program = board.done(board.conv(y, quantized=False))
    made = assigned(program)

    assert copies(made) == [torch.channels_last, torch.contiguous_format, torch.contiguous_format]
    assert all(strides[1] == 1 for strides in strides_of(made))
    check(program, made, n=3)


def test_a_shuffle_of_a_part_of_a_split() -> None:
    board = ConvolutionBoard()
    parts = board.call(aten.split.Tensor, board.conv(board.quantize(board.image())), 4, 1)
    left, right = board.b.item(parts, 0), board.b.item(parts, 1)
    joined = board.call(aten.cat.default, [board.conv(shuffled(board, left, 2)), right], 1)
    program = board.done(board.conv(joined, quantized=False))
    made = assigned(program)

    assert copies(made) == [torch.channels_last, torch.contiguous_format, torch.contiguous_format]
    check(program, made, n=2)


def test_a_shuffled_image_that_leaves_keeps_its_strides() -> None:
    board = ConvolutionBoard()
    y = board.conv(board.conv(board.quantize(board.image())))
    mixed = shuffled(board, y, 2)
    program = board.done(board.conv(board.conv(mixed)), mixed, y)
    made = assigned(program)

    assert strides_of(made) != strides_of(program)
    check(program, made, n=2)


@pytest.mark.parametrize("place", ["view", "transpose", "clone"])
def test_a_shuffle_whose_steps_others_read_leaves_the_region(place: str) -> None:
    board = ConvolutionBoard()
    y = board.conv(board.quantize(board.image()))
    mixed = shuffled(board, y, 2)
    whole = mixed.all_input_nodes[0]
    turned = whole.all_input_nodes[0]
    other = {"view": turned.all_input_nodes[0], "transpose": turned, "clone": whole}[place]
    program = board.done(board.conv(mixed, quantized=False), board.call(aten.neg.default, other))
    made = assigned(program)

    (last,) = [n for n in made.graph.nodes if is_call(n, aten.transpose.int)]
    assert last.args[1:] == (1, 2)
    check(program, made, n=2)


def test_a_view_that_needs_the_strides_gets_them() -> None:
    board = ConvolutionBoard()
    y = residual(board, board.image(2, 6, 6))
    program = board.done(board.call(aten.view.default, y, [2, 8 * 36]))
    made = assigned(program)

    assert copies(made) == [torch.channels_last, torch.contiguous_format]
    (view,) = made.graph.find_nodes(op="call_function", target=aten.view.default)
    assert is_call(view.args[0], aten.clone.default)
    check(program, made)


def test_strides_of_axes_of_size_1_reach_the_op_that_reads_them() -> None:
    """A pool to one pixel keeps the order of its image there, and the next pool takes it over."""
    board = ConvolutionBoard()
    y = residual(board, board.image(2, 6, 6))
    pixel = board.call(aten.adaptive_avg_pool2d.default, y, [1, 1])
    program = board.done(board.call(aten.adaptive_avg_pool2d.default, pixel, [2, 2]))
    made = assigned(program)

    assert copies(made) == [torch.channels_last, torch.contiguous_format]
    check(program, made)


def test_a_pool_to_one_pixel_alone_needs_no_copy() -> None:
    board = ConvolutionBoard()
    y = residual(board, board.image(2, 6, 6))
    pixel = board.call(aten.adaptive_avg_pool2d.default, y, [1, 1])
    program = board.done(board.call(aten.view.default, pixel, [2, 8]))
    made = assigned(program)

    assert copies(made) == [torch.channels_last]
    check(program, made)


def test_a_single_convolution_stays_as_it_is() -> None:
    """Its kernel makes the same two copies."""
    board = ConvolutionBoard()
    program = board.done(board.conv(board.quantize(board.image())))

    assert copies(assigned(program)) == []


def test_without_kernels_nothing_changes() -> None:
    board = ConvolutionBoard()
    program = board.done(residual(board, board.image()))
    missing = KernelLibrary(available=False, reason="switched off by the test")

    assert copies(assigned(program, missing)) == []


def test_every_op_keeps_its_own_provenance() -> None:
    board = ConvolutionBoard()
    program = board.done(residual(board, board.image()))
    made = assigned(program)

    names = [n.name for n in program.graph.find_nodes(op="call_function", target=ops.convolution)]
    found = made.graph.find_nodes(op="call_function", target=ops.convolution)
    assert [origins(node) for node in found] == [(name,) for name in names]


def test_a_stride_that_is_asked_for_is_that_of_before() -> None:
    board = ConvolutionBoard()
    y = residual(board, board.image("n", 6, 6))
    step = board.call(aten.sym_stride.int, y, 1)
    program = board.done(board.call(aten.add.Tensor, y, step))
    made = assigned(program)

    (asked,) = made.graph.find_nodes(op="call_function", target=aten.sym_stride.int)
    assert is_call(asked.args[0], aten.clone.default)
    check(program, made, n=2)


def test_random_numbers_are_drawn_in_the_order_of_before() -> None:
    board = ConvolutionBoard()
    y = residual(board, board.image())
    noise = board.call(aten.rand_like.default, y)
    program = board.done(board.call(aten.add.Tensor, y, noise))
    made = assigned(program)

    (drawn,) = made.graph.find_nodes(op="call_function", target=aten.rand_like.default)
    assert drawn.meta["val"].is_contiguous()


def test_a_pool_of_8_bits_with_indices_stays_row_major() -> None:
    """torch's channels-last pool counts positions in the dtype of the values."""
    board = ConvolutionBoard()
    y = board.conv(board.conv(board.quantize(board.image(2, 20, 20))))
    both = board.call(aten.max_pool2d_with_indices.default, y, [2, 2])
    program = board.done(board.b.item(both, 0), board.b.item(both, 1))
    made = assigned(program)

    assert all(strides[1] == 1 for strides in strides_of(made))
    check(program, made)
