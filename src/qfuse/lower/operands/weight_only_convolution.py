"""Weight-only convolutions: checks, packing and cost."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar

import torch

from qfuse.cost.sizes import at_points
from qfuse.cost.work import Work, WorkRange
from qfuse.ir.dtypes import bit_width
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.refusal import Refusal
from qfuse.kernels import pack_groups, pack_transposed_values, pack_values
from qfuse.lower.operands.checks import (
    float_bias,
)
from qfuse.lower.operands.convolution import (
    by_channel,
    check_channel_groups,
    groups_per_channel,
    settings_of,
    with_strides_of,
)
from qfuse.lower.operands.epilogue import (
    covered_ops,
    loops_behind,
)
from qfuse.lower.operands.packing import least_value
from qfuse.lower.operands.product_conditions import (
    BIAS,
    parameter_conditions,
    weight_of,
    weight_params,
)
from qfuse.lower.operands.weight_only import (
    COMPUTE_KINDS,
    WeightOnlyKernel,
    WeightOnlyOperand,
    operand_conditions,
)
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition, Conditions, hold, on
from qfuse.lower.problems.convolution import ConvolutionProblem
from qfuse.lower.problems.span import CONVOLUTION, Span
from qfuse.rewrite.prelude import Node, Rewriter

_IMPLIED = {4: 8, 8: 0}
"""The zero point that the kernels assume if they are given none, by bits."""


_PARAMETERS: tuple[Condition[ConvolutionProblem], ...] = (
    Condition("kernels know the granularity of the weight", check_channel_groups),
    *on(weight_params, parameter_conditions("weight")),
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weights of all groups as one matrix."""

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Pack the quantized values of a weight."""
        return pack_values(values)


@dataclass(frozen=True, slots=True)
class PhaseMatrices:
    """The weight of a transposed convolution as one matrix per phase."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Pack the quantized values of a weight."""
        return pack_transposed_values(values, self.stride, self.dilation, self.groups)


@dataclass(frozen=True, slots=True)
class WeightOnlyConvolution(WeightOnlyKernel):
    """A convolution of float activations with a packed weight."""

    covers: ClassVar[tuple[Span, ...]] = (CONVOLUTION,)

    @property
    @abstractmethod
    def fits(self) -> Condition[ConvolutionProblem]:
        """The condition on a weight that fits the packed format."""

    def conditions(self, problem: ConvolutionProblem) -> Conditions:
        """Return those on the operands."""
        del problem
        zero_points = Condition("the zero points of the codes fit them", self._check_zero_points)
        operands = operand_conditions("convolution", self.floats)
        return (*operands, *_PARAMETERS, BIAS, self.fits, zero_points)

    def accepts(self, problem: ConvolutionProblem) -> Claim | Refusal:
        """Accept float activations, and integers with scales per output channel or in groups."""
        refusal = hold(self.conditions(problem), problem)
        if refusal is not None:
            return refusal
        steps = covered_ops(problem)
        return Claim(steps, False, [self._work(problem, steps), *loops_behind(problem, steps)])

    def emit(self, problem: ConvolutionProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the call with the packed weight."""
        fused = problem.fused
        args = [
            *self.weight_arguments(problem, self._pack(problem), rw),
            problem.n,
            float_bias(problem, rw),
            *settings_of(problem, fused.groups),
            *self.epilogue_arguments(problem, claim, rw),
        ]
        return {0: with_strides_of(fused.node, rw.call(self.op(), *args), rw)}

    def _pack(self, problem: ConvolutionProblem) -> WeightOnlyOperand:
        stored, params = problem.weight, problem.fused.weight_params
        assert stored is not None, "it is a constant"
        assert params is not None, "accepted without weight params"
        tensors = (stored, *map(constant_of, params.tensors))
        layout = _layout(problem)
        make = partial(self._packed, problem, stored, params, layout)
        settings = str(params.spec), self.bits, problem.fused.groups
        return self.packer.once(make, tensors, "weight-only taps", *settings, layout)

    def _packed(
        self,
        problem: ConvolutionProblem,
        stored: torch.Tensor,
        params: QuantParams,
        layout: Matrix | PhaseMatrices,
    ) -> WeightOnlyOperand:
        scale = constant_of(params.scale)
        assert scale is not None, "it is a constant"
        rounded = scale.detach().to(params.spec.arithmetic.compute).to(torch.float32)
        zero = self._zero_points(problem, stored)
        narrow = zero.to(torch.uint8 if self.bits == 4 else torch.int8)  # noqa: PLR2004
        kept = None if bool((zero == _IMPLIED[self.bits]).all()) else narrow
        values = self.packer.tap_values(stored, params.spec, self.bits, layout)
        scales = pack_groups(by_channel(problem, rounded))
        zeros = None if kept is None else pack_groups(by_channel(problem, kept))
        return WeightOnlyOperand(values, scales, zeros, None)

    def _zero_points(self, problem: ConvolutionProblem, stored: torch.Tensor) -> torch.Tensor:
        """Return the zero points of the values in the grid of the scales, as int32."""
        params = problem.fused.weight_params
        assert params is not None, "checked before"
        grid = tuple(map(int, params.spec.grid(stored.shape)))
        zero = None if params.zero_point is None else constant_of(params.zero_point)
        whole = torch.zeros(grid, dtype=torch.int32) if zero is None else zero.to(torch.int32)
        return whole - least_value(stored, params.spec, self.bits)

    def _check_zero_points(self, problem: ConvolutionProblem) -> Refusal | None:
        zero = self._zero_points(problem, weight_of(problem))
        low, high = (0, 15) if self.bits == 4 else (-128, 127)  # noqa: PLR2004
        if zero.numel() == 0 or low <= int(zero.min()) <= int(zero.max()) <= high:
            return None
        return Refusal(f"the weight has a zero point outside its {high - low + 1} codes")

    def _work(self, problem: ConvolutionProblem, steps: int) -> WorkRange:
        fused, bits = problem.fused, self.bits
        x_bits, out_bits = bit_width(problem.float_dtype), bit_width(fused.float_types()[steps])
        groups = groups_per_channel(problem)
        assert isinstance(groups, int), "checked before"
        parameters = 4 * problem.n * (groups if groups == 1 else groups * prod(problem.kernel))

        def build(rows: int, elements: int) -> Work:
            flops = 2.0 * rows * problem.k * problem.n
            return Work(
                flops=flops,
                kind=COMPUTE_KINDS[problem.float_dtype],
                weight_bytes=problem.k * problem.n * bits / 8 + parameters,
                reads=(elements * x_bits / 8,),
                writes=(rows * problem.n * out_bits / 8,),
                one_row_flops=flops / max(rows, 1),
            )

        return at_points(build, problem.rows, problem.elements)


def _layout(problem: ConvolutionProblem) -> Matrix | PhaseMatrices:
    fused = problem.fused
    if fused.transposed:
        return PhaseMatrices(fused.stride, fused.dilation, fused.groups)
    return Matrix()
