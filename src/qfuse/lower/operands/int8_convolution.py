"""Shared code of qfuse's int8 convolutions: operand checks, packed constants, work and call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.cost.sizes import at_points
from qfuse.cost.work import ComputeKind, Work, WorkRange
from qfuse.ir.dtypes import bit_width
from qfuse.ir.refusal import Refusal
from qfuse.kernels import KernelLibrary
from qfuse.lower.operands.checks import (
    check_activation,
    check_bias,
    check_platform,
    float_out,
    output_args,
    scale_node,
    stored_zero,
    typed,
)
from qfuse.lower.operands.convolution import (
    channel_vector,
    check_channels,
    check_per_tensor,
    with_strides_of,
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
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.convolution import ConvolutionProblem
from qfuse.lower.problems.span import CONVOLUTION, Span
from qfuse.rewrite.prelude import Node, OpOverload, Rewriter
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
    def geometry(self, problem: ConvolutionProblem) -> list[Argument]:
        """Return the arguments between the bias and the epilogue's operands."""

    @abstractmethod
    def check_weight(self, problem: ConvolutionProblem) -> Refusal | None:
        """Refuse weights that the kernel does not support."""

    @abstractmethod
    def weight_arguments(self, problem: ConvolutionProblem, rw: Rewriter) -> list[Argument]:
        """Emit the constants of the weight; return the arguments from it to the bias."""

    def depth(self, problem: ConvolutionProblem) -> int:
        """Return the products per output element that its time is predicted by."""
        return problem.k

    def supported(self, target: Target) -> Refusal | None:
        """Refuse if the kernels could not be built."""
        return check_platform(self.library, target)

    def accepts(self, problem: ConvolutionProblem) -> Claim | Refusal:
        """Accept the convolution with the leading epilogue ops that the kernel knows."""
        refusal = (
            check_activation(problem)
            or check_per_tensor(problem)
            or self.check_weight(problem)
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
        return {0: with_strides_of(fused.node, y, rw)}

    def _arguments(self, problem: ConvolutionProblem, claim: Claim, rw: Rewriter) -> list[Argument]:
        fused, x = problem.fused, problem.fused.x_params
        assert x is not None, "accepted without activation params"
        steps = kernel_steps(problem, claim)
        return [
            fused.x,
            scale_node(x, rw),
            None if x.zero_point is None else stored_zero(x.zero_point, x.spec.dtype, rw),
            *self.weight_arguments(problem, rw),
            None if fused.bias is None else typed(fused.bias, torch.float32, rw),
            *self.geometry(problem),
            kernel_extras(steps, rw),
            steps.text,
            problem.float_dtype,
        ]

    def _op(self, kind: str) -> OpOverload:
        name = self.name.removeprefix("qfuse.") + kind
        op: OpOverload = getattr(torch.ops.qfuse, name).default
        return op

    def _work(self, problem: ConvolutionProblem, *, output: bool) -> list[WorkRange]:
        out_bits = 8 if output else bit_width(float_out(problem.fused))

        def build(rows: int, elements: int) -> Work:
            flops = 2.0 * rows * self.depth(problem) * problem.n
            return Work(
                flops=flops,
                kind=ComputeKind.INT8,
                weight_bytes=problem.k * problem.n,
                reads=(float(elements),),
                writes=(rows * problem.n * out_bits / 8,),
                one_row_flops=flops / max(rows, 1),
            )

        return [at_points(build, problem.rows, problem.elements)]


class ChannelConvolution(Int8Convolution):
    """An int8 convolution whose weight has one scale, or one per output channel."""

    __slots__ = ()

    @abstractmethod
    def pack(self, problem: ConvolutionProblem) -> Packed:
        """Pack the weight."""

    def check_weight(self, problem: ConvolutionProblem) -> Refusal | None:
        """Refuse other scales, and weights that are not constant 8-bit integers."""
        return check_channels(problem) or check_int8_weight(problem)

    def weight_arguments(self, problem: ConvolutionProblem, rw: Rewriter) -> list[Argument]:
        """Emit the packed weight, its sums, scales and zero points."""
        fused, params = problem.fused, problem.fused.weight_params
        assert params is not None, "accepted without weight params"
        packed, name = self.pack(problem), fused.weight.target
        zero = packed.zero_point
        return [
            rw.constant(packed.weight, f"{name}_packed"),
            rw.constant(packed.sums, f"{name}_sums"),
            channel_vector(params, problem, rw),
            None if zero is None else rw.constant(zero, f"{name}_zero"),
        ]
