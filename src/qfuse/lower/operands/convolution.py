"""What all kernels of convolutions check and add: granularity, per-channel constants, strides."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams, shape_of, tensor_of
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_strides
from qfuse.lower.layout.memory_formats import formats_of_rank
from qfuse.lower.operands.checks import is_whole
from qfuse.lower.problems.convolution import ConvolutionProblem
from qfuse.rewrite.prelude import Node, Rewriter


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
    if fused.weight_params is None:
        return Refusal("the weight is not quantized")
    if is_per_channel(problem):
        return None
    text = fused.weight_params.spec.block_text()
    return Refusal(f"the weight is scaled in blocks of {text}, not per output channel")


def is_per_channel(problem: ConvolutionProblem) -> bool:
    """Whether the weight has one scale, or one for every output channel of a group."""
    params, shape = problem.fused.weight_params, shape_of(problem.fused.weight)
    assert params is not None, "checked before"
    block = params.spec.block
    return is_whole(block, shape) or _has_whole_features(problem, block)


def _has_whole_features(problem: ConvolutionProblem, block: Block) -> bool:
    """Whether every output channel of a group has its own scale."""
    axis = 1 if problem.fused.transposed else 0
    shape = shape_of(problem.fused.weight)
    rest = [(b, s) for i, (b, s) in enumerate(zip(block, shape, strict=True)) if i != axis]
    return block[axis] == 1 and is_whole(tuple(b for b, _ in rest), [s for _, s in rest])


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
    value = per_channel(problem, params.scale)
    rounded = value.detach().to(params.spec.arithmetic.compute).to(torch.float32)
    return rw.constant(rounded.contiguous(), f"{params.scale.target}_vector")


def per_channel(problem: ConvolutionProblem, part: Node) -> torch.Tensor:
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
    """Return ``new`` with the memory format of the value that it replaces."""
    was = tensor_of(old)
    if same_strides(was, tensor_of(new)):
        return new
    for memory_format in formats_of_rank(was.dim()):
        copy = rw.call(torch.ops.aten.clone.default, new, memory_format=memory_format)
        if same_strides(was, tensor_of(copy)):
            return copy
    return new
