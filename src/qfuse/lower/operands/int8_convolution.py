"""Shared code of qfuse's int8 convolutions: operand checks, packed constants, work and call."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch.fx.node import Argument

from qfuse.cost.sizes import at_points
from qfuse.cost.work import ComputeKind, Work, WorkRange
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import (
    check_activation,
    check_bias,
)
from qfuse.lower.operands.convolution import (
    channel_vector,
    check_channels,
    check_per_tensor,
    with_strides_of,
)
from qfuse.lower.operands.epilogue import (
    kernel_epilogue,
)
from qfuse.lower.operands.int8_kernel import Int8Kernel
from qfuse.lower.operands.int8_weight import check_int8_weight
from qfuse.lower.operands.packing import Packed
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.convolution import ConvolutionProblem
from qfuse.lower.problems.span import CONVOLUTION, Span
from qfuse.rewrite.prelude import Node, Rewriter


@dataclass(frozen=True, slots=True)
class Int8Convolution(Int8Kernel):
    """A convolution of quantized activations."""

    covers: ClassVar[tuple[Span, ...]] = (CONVOLUTION,)

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

    def accepts(self, problem: ConvolutionProblem) -> Claim | Refusal:
        """Accept the convolution with the leading epilogue ops that the kernel knows."""
        refusal = (
            check_activation(problem)
            or check_per_tensor(problem)
            or self.check_weight(problem)
            or check_bias(problem)
            or self.check(problem)
        )
        return refusal or self.claim(problem, partial(self._work, problem))

    def emit(self, problem: ConvolutionProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the call with packed constants."""
        steps = kernel_epilogue(problem, claim)
        args = [
            *self.activation_arguments(problem, rw),
            *self.weight_arguments(problem, rw),
            *self.epilogue_arguments(problem, steps, rw, self.geometry(problem)),
        ]
        y = self.call(problem, claim, args, rw)
        return {0: with_strides_of(problem.fused.node, y, rw)}

    def _work(self, problem: ConvolutionProblem, out_bits: int) -> list[WorkRange]:
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
