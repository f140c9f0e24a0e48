"""Shared code of qfuse's int8 convolutions: operand checks, packed constants, work and call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.cost.sizes import at_points
from qfuse.cost.work import ComputeKind, Work, WorkRange
from qfuse.ir.errors import RewriteError
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams, shape_of, tensor_of
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_strides
from qfuse.kernels import KernelLibrary
from qfuse.lower.layout.memory_formats import formats_of_rank
from qfuse.lower.operands.checks import (
    bits_of,
    check_activation,
    check_bias,
    check_platform,
    float_out,
    is_whole,
    output_args,
    scale_node,
    stored_zero,
    typed,
)
from qfuse.lower.operands.epilogue import (
    claimed_dtype,
    claims_output,
    covered_steps,
    kernel_extras,
    kernel_steps,
    loops_behind,
)
from qfuse.lower.operands.int8_weight import check_int8_weight
from qfuse.lower.operands.packing import Packed, Packer
from qfuse.lower.problems.convolution import ConvolutionProblem
from qfuse.lower.select.kernel import CONVOLUTION, Claim, Span
from qfuse.rewrite.prelude import Node, OpOverload, Rewriter, aten
from qfuse.targets.target import Target


@dataclass(frozen=True, slots=True)
class Int8Convolution(ABC):
    """A convolution of quantized activations, as two ops.

    ``qfuse::name`` returns floats, ``qfuse::name_quantized`` quantized values with static
    parameters.

    Attributes:
        library: The compiled kernels, or the reason why they are not available.
        packer: Packs weights; shared by all kernels of one lowering.
    """

    covers: ClassVar[tuple[Span, ...]] = (CONVOLUTION,)

    library: KernelLibrary
    packer: Packer

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in the report: ``qfuse.`` and the name of the first op."""

    @abstractmethod
    def check(self, problem: ConvolutionProblem) -> Refusal | None:
        """Refuse geometries that the kernel does not support."""

    @abstractmethod
    def pack(self, problem: ConvolutionProblem) -> Packed:
        """Pack the weight."""

    @abstractmethod
    def geometry(self, problem: ConvolutionProblem) -> list[Argument]:
        """Return the arguments between the bias and the epilogue's operands."""

    def supported(self, target: Target) -> Refusal | None:
        """Refuse if the kernels could not be built."""
        return check_platform(self.library, target)

    def accepts(self, problem: ConvolutionProblem) -> Claim | Refusal:
        """Accept the convolution with the leading epilogue ops that the kernel knows."""
        refusal = (
            check_activation(problem)
            or _check_granularity(problem)
            or check_int8_weight(problem)
            or check_bias(problem)
            or self.check(problem)
        )
        if refusal is not None:
            return refusal
        steps = covered_steps(problem)
        output = claims_output(problem, steps)
        work = [*self._work(problem, output=output), *loops_behind(problem, steps)]
        return Claim(steps, output, work)

    def emit(self, problem: ConvolutionProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the call with packed constants."""
        fused = problem.fused
        args = self._arguments(problem, claim, rw)
        if claim.output:
            assert fused.out_params is not None, "the claim covers the output"
            y = rw.call(self._op("_quantized"), *args, *output_args(fused.out_params, rw))
        else:
            y = rw.call(self._op(""), *args, claimed_dtype(problem, claim))
        return {0: _with_strides_of(fused.node, y, rw)}

    def _arguments(self, problem: ConvolutionProblem, claim: Claim, rw: Rewriter) -> list[Argument]:
        fused, x, weight = problem.fused, problem.fused.x_params, problem.fused.weight_params
        assert x is not None, "accepted without activation params"
        assert weight is not None, "accepted without weight params"
        packed, name = self.pack(problem), fused.weight.target
        steps, zero = kernel_steps(problem, claim), packed.zero_point
        return [
            fused.x,
            scale_node(x, rw),
            None if x.zero_point is None else stored_zero(x.zero_point, x.spec.dtype, rw),
            rw.constant(packed.weight, f"{name}_packed"),
            rw.constant(packed.sums, f"{name}_sums"),
            channel_vector(weight, problem, rw),
            None if zero is None else rw.constant(zero, f"{name}_zero"),
            None if fused.bias is None else typed(fused.bias, torch.float32, rw),
            *self.geometry(problem),
            kernel_extras(steps, rw),
            steps.text,
            problem.real,
        ]

    def _op(self, kind: str) -> OpOverload:
        name = self.name.removeprefix("qfuse.") + kind
        op: OpOverload = getattr(torch.ops.qfuse, name).default
        return op

    def _work(self, problem: ConvolutionProblem, *, output: bool) -> list[WorkRange]:
        out_bits = 8 if output else bits_of(float_out(problem.fused))

        def build(rows: int, elements: int) -> Work:
            flops = 2.0 * rows * problem.k * problem.n
            return Work(
                flops=flops,
                kind=ComputeKind.INT8,
                weight_bytes=problem.k * problem.n,
                reads=(float(elements),),
                writes=(rows * problem.n * out_bits / 8,),
                one_row_flops=flops / max(rows, 1),
            )

        return [at_points(build, problem.rows, problem.elements)]


def _check_granularity(problem: ConvolutionProblem) -> Refusal | None:
    """Refuse activations that are not scaled per tensor, weights not per output channel."""
    fused = problem.fused
    if fused.x_params is not None and not is_whole(fused.x_params.spec.block, shape_of(fused.x)):
        text = fused.x_params.spec.block_text()
        return Refusal(f"the activation is scaled in blocks of {text}, not per tensor")
    if fused.weight_params is None:
        return Refusal("the weight is not quantized")
    block, shape = fused.weight_params.spec.block, shape_of(fused.weight)
    if is_whole(block, shape) or _is_per_channel(problem, block):
        return None
    text = fused.weight_params.spec.block_text()
    return Refusal(f"the weight is scaled in blocks of {text}, not per output channel")


def _is_per_channel(problem: ConvolutionProblem, block: Block) -> bool:
    """Whether every output channel of a group has its own scale."""
    axis = 1 if problem.fused.transposed else 0
    shape = shape_of(problem.fused.weight)
    rest = [(b, s) for i, (b, s) in enumerate(zip(block, shape, strict=True)) if i != axis]
    return block[axis] == 1 and is_whole(tuple(b for b, _ in rest), [s for _, s in rest])


def channel_vector(params: QuantParams, problem: ConvolutionProblem, rw: Rewriter) -> Node:
    """Return the scale of every output channel, after rounding it to the source's compute dtype."""
    value = _per_channel(problem, params.scale)
    rounded = value.detach().to(params.spec.arithmetic.compute).to(torch.float32)
    return rw.constant(rounded.contiguous(), f"{params.scale.target}_vector")


def _per_channel(problem: ConvolutionProblem, part: Node) -> torch.Tensor:
    """Return a scale or zero point as one number per output channel of the whole convolution.

    The groups of a transposed convolution share those of its weight's second axis.
    """
    value = constant_of(part)
    assert value is not None, f"not a constant: {part.format_node()}"
    flat = value.reshape(-1)
    if flat.numel() == 1:
        return flat.expand(problem.n)
    return flat.repeat(problem.n // flat.numel())


def _with_strides_of(old: Node, new: Node, rw: Rewriter) -> Node:
    """Return ``new`` with the strides of the value that it replaces.

    Raises:
        RewriteError: No order of the axes has these strides.
    """
    was = tensor_of(old)
    if same_strides(was, tensor_of(new)):
        return new
    for memory_format in formats_of_rank(was.dim()):
        copy = rw.call(aten.clone.default, new, memory_format=memory_format)
        if same_strides(was, tensor_of(copy)):
            return copy
    # No memory format says that the channels of an unbatched image, or of a row, are adjacent.
    for channels in range(was.dim() - 1):
        order = [axis for axis in range(was.dim()) if axis != channels] + [channels]
        back = [order.index(axis) for axis in range(was.dim())]
        turned = rw.call(aten.permute.default, new, order)
        rows = rw.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        copy = rw.call(aten.permute.default, rows, back)
        if same_strides(was, tensor_of(copy)):
            return copy
    raise RewriteError("the kernel's result cannot have the strides of the source's")
