"""What all kernels of convolutions check and add: granularity, per-channel constants, strides."""

from __future__ import annotations

from math import prod

import torch
from torch.fx.node import Argument

from qfuse.ir.errors import RewriteError
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.memory_formats import formats_of_rank
from qfuse.ir.ops.views import QuantParams, shape_of, tensor_of
from qfuse.ir.quant.block import covers, is_whole
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_size, same_strides
from qfuse.kernels.weight_only import GROUP_MULTIPLE
from qfuse.lower.problems.conditions import refusal_in
from qfuse.lower.problems.convolution import ConvolutionProblem
from qfuse.rewrite.prelude import Node, Rewriter, aten
from qfuse.rewrite.regions import cloned_in_order

_PER_INPUT = (
    "the weight's scales run along the input channels, one each: "
    "kernels take one per output channel"
)


def check_per_tensor(problem: ConvolutionProblem) -> Refusal | None:
    """Refuse quantized activations that are not scaled per tensor."""
    fused = problem.fused
    if fused.x_params is None or is_whole(fused.x_params.spec.block, shape_of(fused.x)):
        return None
    text = fused.x_params.spec.block_text()
    return Refusal(f"the activation is scaled in blocks of {text}, not per tensor")


def check_channels(problem: ConvolutionProblem) -> Refusal | None:
    """Refuse weights that are scaled neither per tensor nor per output channel."""
    fused = problem.fused
    assert fused.weight_params is not None, "checked before"
    if is_per_channel(problem):
        return None
    if _is_alone(problem, fused.weight_params.spec.block, outputs=False):
        return Refusal(_PER_INPUT)
    text = fused.weight_params.spec.block_text()
    return Refusal(f"the weight is scaled in blocks of {text}, not per output channel")


def is_per_channel(problem: ConvolutionProblem) -> bool:
    """Whether the weight has one scale, or one for every output channel of a group."""
    params, shape = problem.fused.weight_params, shape_of(problem.fused.weight)
    assert params is not None, "checked before"
    block = params.spec.block
    return is_whole(block, shape) or _is_alone(problem, block, outputs=True)


def _is_alone(problem: ConvolutionProblem, block: Block, *, outputs: bool) -> bool:
    """Whether every output channel, or every input channel, of a group has its own scale."""
    axis = 1 if problem.fused.transposed == outputs else 0
    shape = shape_of(problem.fused.weight)
    rest = [(b, s) for i, (b, s) in enumerate(zip(block, shape, strict=True)) if i != axis]
    return block[axis] == 1 and is_whole(tuple(b for b, _ in rest), [s for _, s in rest])


def groups_per_channel(problem: ConvolutionProblem) -> int | Refusal:
    """Return how many scales an output channel has per tap, or refuse unsupported granularities."""
    fused, shape = problem.fused, [int(size) for size in shape_of(problem.fused.weight)]
    assert fused.weight_params is not None, "checked before"
    block = fused.weight_params.spec.block
    refusal = Refusal(
        f"the weight is scaled in blocks of {fused.weight_params.spec.block_text()}, not per "
        f"output channel or in groups of a multiple of {GROUP_MULTIPLE} input channels"
    )
    inputs, features = (0, 1) if fused.transposed else (1, 0)
    channels = problem.channels // fused.groups
    if not all(covers(b, s) for b, s in zip(block[2:], shape[2:], strict=True)):
        return refusal
    if block[features] != 1 and not covers(block[features], shape[features]):
        return refusal
    size = block[inputs]
    if size is None or covers(size, shape[inputs]):
        return 1
    if size < 1 or channels % size:
        return refusal
    groups = channels // size
    return groups if groups == 1 or size % GROUP_MULTIPLE == 0 else refusal


def check_channel_groups(problem: ConvolutionProblem) -> Refusal | None:
    """Refuse weights whose scales are neither per output channel nor in groups of inputs."""
    return refusal_in(groups_per_channel(problem))


def by_channel(problem: ConvolutionProblem, values: torch.Tensor) -> torch.Tensor:
    """Return values in the grid of the scales as ``[N, groups]``, in the order of the weights.

    That is one per output channel, or one per group of input channels of every tap.
    """
    fused = problem.fused
    grid = values.reshape(values.shape[:2])
    if fused.transposed:
        parts = grid.shape[0] // fused.groups if grid.shape[0] > 1 else 1
        grid = grid.expand(-1, problem.n // fused.groups)
        whole = grid.expand(parts * fused.groups, -1)
        grid = whole.reshape(fused.groups, parts, -1).transpose(1, 2).flatten(0, 1)
    else:
        grid = grid.expand(problem.n, -1)
    return grid if grid.shape[1] == 1 else grid.repeat(1, prod(problem.kernel))


def settings_of(problem: ConvolutionProblem, groups: int) -> list[Argument]:
    """Return the kernel size and the settings, in the order of the schemas.

    Args:
        problem: The convolution.
        groups: Groups of channels of its packed weight.
    """
    fused = problem.fused
    return [
        list(problem.kernel),
        list(fused.stride),
        list(fused.padding),
        list(fused.dilation),
        list(fused.output_padding),
        fused.transposed,
        groups,
    ]


def channel_vector(params: QuantParams, problem: ConvolutionProblem, rw: Rewriter) -> Node:
    """Return the scale of every output channel, after rounding it to the source's compute dtype."""
    value = channel_values(problem, params.scale)
    rounded = value.detach().to(params.spec.arithmetic.compute).to(torch.float32)
    return rw.constant(rounded.contiguous(), f"{params.scale.target}_vector")


def channel_values(problem: ConvolutionProblem, part: Node) -> torch.Tensor:
    """Return a scale or zero point as one number per output channel of the whole convolution.

    The groups of a transposed convolution share those of its weight's second axis.
    """
    value = constant_of(part)
    assert value is not None, f"not a constant: {part.format_node()}"
    flat = value.reshape(-1)
    if flat.numel() == 1:
        return flat.expand(problem.n)
    return flat.repeat(problem.n // flat.numel())


def with_strides_of(old: Node, new: Node, rw: Rewriter) -> Node:
    """Return ``new`` with the strides of the value that it replaces.

    Raises:
        RewriteError: No order of the axes has these strides.
    """
    was = tensor_of(old)
    if same_strides(was, tensor_of(new)):
        return _with_stride_of_channel(was, new, rw)
    for memory_format in formats_of_rank(was.dim()):
        copy = rw.call(aten.clone.default, new, memory_format=memory_format)
        if same_strides(was, tensor_of(copy)):
            return copy
    # No memory format says that the channels of an unbatched image, or of a row, are adjacent.
    for channels in range(was.dim() - 1):
        order = [axis for axis in range(was.dim()) if axis != channels] + [channels]
        copy = cloned_in_order(new, order, rw)
        if same_strides(was, tensor_of(copy)):
            return copy
    raise RewriteError("the kernel's result cannot have the strides of the source's")


def _with_stride_of_channel(was: torch.Tensor, new: Node, rw: Rewriter) -> Node:
    """Return ``new``, whose strides are those of ``was``, also with that of a single channel.

    It is arbitrary for memory, but tells the next convolution the layout of its result.
    """
    made = tensor_of(new)
    channel = 1
    differs = not same_size(made.stride(channel), was.stride(channel))
    if not differs or not same_size(made.shape[channel], 1):
        return new
    rows = rw.call(aten.squeeze.dim, new, channel)
    if same_size(was.stride(channel), 1):
        last = rw.call(aten.unsqueeze.default, rows, -1)
        return rw.call(aten.movedim.int, last, -1, channel)
    return rw.call(aten.unsqueeze.default, rows, channel)
