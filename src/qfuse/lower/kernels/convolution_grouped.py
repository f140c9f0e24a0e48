"""qfuse's own int8 convolution with scales per group of input channels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.refusal import Refusal
from qfuse.kernels.pack_convolution import pack_convolution, pack_transposed
from qfuse.kernels.pack_convolution_groups import (
    group_sums,
    pack_channel_groups,
    transposed_group_sums,
)
from qfuse.lower.operands.convolution import (
    by_channel,
    check_channel_groups,
    groups_per_channel,
    settings_of,
)
from qfuse.lower.operands.int8_convolution import Int8Convolution
from qfuse.lower.operands.int8_weight import INT8_WEIGHT
from qfuse.lower.operands.packing import signed_values, signed_zero_point
from qfuse.lower.operands.product_conditions import WEIGHT_QUANTIZED, weight_of, weight_params
from qfuse.lower.problems.conditions import Condition
from qfuse.lower.problems.convolution import ConvolutionProblem
from qfuse.rewrite.prelude import Rewriter

# The overhead of a group as a number of extra products, as in linears.
_GROUP_COST = 12


@dataclass(frozen=True, slots=True)
class ConvolutionGrouped(Int8Convolution):
    """8-bit activations per tensor, 8-bit weights in groups of input channels."""

    name: str = "qfuse.convolution_w8a8_grouped"

    @property
    def on_geometry(self) -> tuple[Condition[ConvolutionProblem], ...]:
        """Every geometry."""
        return ()

    @property
    def on_weight(self) -> tuple[Condition[ConvolutionProblem], ...]:
        """Constant 8-bit integers without zero points, with scales in groups."""
        return _WEIGHT

    def depth(self, problem: ConvolutionProblem) -> int:
        """Return the products per output element, plus the overhead of the groups."""
        groups = groups_per_channel(problem)
        assert isinstance(groups, int), "checked before"
        return problem.k + groups * prod(problem.kernel) * _GROUP_COST

    def weight_arguments(self, problem: ConvolutionProblem, rw: Rewriter) -> list[Argument]:
        """Emit the packed weight, and the sums and scales of its groups."""
        fused, stored, params = problem.fused, problem.weight, problem.fused.weight_params
        assert stored is not None, "it is a constant"
        assert params is not None, "accepted without weight params"
        geometry = (fused.transposed, fused.stride, fused.dilation, fused.groups)
        tensors = (stored, constant_of(params.scale))
        make = partial(_pack, problem, stored)
        values, sums, scales = self.packer.once(
            make, tensors, "grouped taps", str(params.spec), geometry
        )
        name = fused.weight.target
        return [
            rw.constant(values, f"{name}_packed"),
            rw.constant(sums, f"{name}_sums"),
            rw.constant(scales, f"{name}_scales"),
            problem.n,
        ]

    def geometry(self, problem: ConvolutionProblem) -> list[Argument]:
        """Return the kernel size and the settings."""
        return settings_of(problem, problem.fused.groups)


def _check_grouped(problem: ConvolutionProblem) -> Refusal | None:
    if groups_per_channel(problem) == 1:
        return Refusal("the weight's scales are not grouped along its input channels")
    return None


def _check_zero_points(problem: ConvolutionProblem) -> Refusal | None:
    if signed_zero_point(weight_of(problem), weight_params(problem)) is None:
        return None
    return Refusal("the weight has zero points, and scales in groups of input channels")


_WEIGHT: tuple[Condition[ConvolutionProblem], ...] = (
    WEIGHT_QUANTIZED,
    Condition("kernels know the granularity of the weight", check_channel_groups),
    Condition("the weight has scales of groups of input channels", _check_grouped),
    *INT8_WEIGHT,
    Condition("the weight has no zero points", _check_zero_points),
)


def _pack(
    problem: ConvolutionProblem, stored: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the packed values, the sums of their groups, and the scales."""
    fused, params = problem.fused, problem.fused.weight_params
    assert params is not None, "accepted without weight params"
    scale = constant_of(params.scale)
    assert scale is not None, "it is a constant"
    rounded = scale.detach().to(params.spec.arithmetic.compute).to(torch.float32)
    scales = pack_channel_groups(by_channel(problem, rounded), fused.groups)
    count = groups_per_channel(problem)
    assert isinstance(count, int), "checked before"
    size = problem.channels // fused.groups // count
    codes = signed_values(stored)
    if fused.transposed:
        phases = (fused.stride, fused.dilation, fused.groups)
        sums = transposed_group_sums(codes, size, *phases)
        return pack_transposed(codes, *phases), sums, scales
    return pack_convolution(codes, fused.groups), group_sums(codes, size, fused.groups), scales
