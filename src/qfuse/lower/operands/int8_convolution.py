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
from qfuse.lower.operands.int8_weight import INT8_WEIGHT
from qfuse.lower.operands.packing import Packed
from qfuse.lower.operands.product_conditions import ACTIVATION, BIAS, WEIGHT_QUANTIZED
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition, Conditions, hold
from qfuse.lower.problems.convolution import ConvolutionProblem
from qfuse.lower.problems.span import CONVOLUTION, Span
from qfuse.rewrite.prelude import Node, Rewriter

_ACTIVATION: tuple[Condition[ConvolutionProblem], ...] = (
    *ACTIVATION,
    Condition("the activation has one scale", check_per_tensor),
)

_CHANNELS: tuple[Condition[ConvolutionProblem], ...] = (
    WEIGHT_QUANTIZED,
    Condition("the weight has one scale, or one per output channel", check_channels),
    *INT8_WEIGHT,
)


@dataclass(frozen=True, slots=True)
class Int8Convolution(Int8Kernel):
    """A convolution of quantized activations."""

    covers: ClassVar[tuple[Span, ...]] = (CONVOLUTION,)

    @property
    @abstractmethod
    def on_geometry(self) -> tuple[Condition[ConvolutionProblem], ...]:
        """The conditions on the geometry."""

    @abstractmethod
    def geometry(self, problem: ConvolutionProblem) -> list[Argument]:
        """Return the arguments between the bias and the epilogue's operands."""

    @property
    @abstractmethod
    def on_weight(self) -> tuple[Condition[ConvolutionProblem], ...]:
        """The conditions on the weight."""

    @abstractmethod
    def weight_arguments(self, problem: ConvolutionProblem, rw: Rewriter) -> list[Argument]:
        """Emit the constants of the weight; return the arguments from it to the bias."""

    def depth(self, problem: ConvolutionProblem) -> int:
        """Return the products per output element that its time is predicted by."""
        return problem.k

    def conditions(self, problem: ConvolutionProblem) -> Conditions:
        """Return those on the operands, and on the geometry."""
        del problem
        return (*_ACTIVATION, *self.on_weight, BIAS, *self.on_geometry)

    def accepts(self, problem: ConvolutionProblem) -> Claim | Refusal:
        """Accept the convolution with the leading epilogue ops that the kernel knows."""
        refusal = hold(self.conditions(problem), problem)
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

    @property
    def on_weight(self) -> tuple[Condition[ConvolutionProblem], ...]:
        """Constant 8-bit integers with one scale, or one per output channel."""
        return _CHANNELS

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
