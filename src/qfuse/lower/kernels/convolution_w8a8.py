"""qfuse's own int8 convolution, for every geometry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.refusal import Refusal
from qfuse.kernels.merge_groups import groups_to_merge, merge_groups, merge_transposed_groups
from qfuse.kernels.pack_convolution import (
    convolution_sums,
    pack_convolution,
    pack_transposed,
    transposed_sums,
)
from qfuse.lower.operands.convolution import settings_of
from qfuse.lower.operands.int8_convolution import ChannelConvolution
from qfuse.lower.operands.packing import Packed, TapLayout
from qfuse.lower.problems.conditions import Condition
from qfuse.lower.problems.convolution import ConvolutionProblem


@dataclass(frozen=True, slots=True)
class Groups:
    """The weight of every group as a matrix, ``merged`` groups together."""

    groups: int
    merged: int

    def pack(self, weight: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """Pack an int8 weight."""
        merged = merge_groups(weight, zero_point, self.groups, self.merged)
        return pack_convolution(merged, self.groups // self.merged)

    def sums(self, weight: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """Sum the weight minus its zero point for every output channel."""
        return convolution_sums(weight, zero_point)


@dataclass(frozen=True, slots=True)
class Phases:
    """The weight of a transposed convolution as those of ordinary ones, one per phase."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    merged: int

    def pack(self, weight: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """Pack an int8 weight."""
        merged = merge_transposed_groups(weight, zero_point, self.groups, self.merged)
        return pack_transposed(merged, self.stride, self.dilation, self.groups // self.merged)

    def sums(self, weight: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """Sum the weight minus its zero point for every output channel of every phase."""
        return transposed_sums(weight, self.stride, self.dilation, self.groups, zero_point)


@dataclass(frozen=True, slots=True)
class ConvolutionW8A8(ChannelConvolution):
    """8-bit activations per tensor, 8-bit weights per tensor or output channel."""

    name: str = "qfuse.convolution_w8a8"

    @property
    def on_geometry(self) -> tuple[Condition[ConvolutionProblem], ...]:
        """Every geometry except those of the depthwise kernel, which is faster."""
        return (Condition("a group has several input channels", _check_channels),)

    def pack(self, problem: ConvolutionProblem) -> Packed:
        """Pack the weight of every group as a matrix; groups of few channels are merged."""
        fused, merged = problem.fused, _merged(problem)
        assert fused.weight_params is not None, "accepted without weight params"
        layout: TapLayout = Groups(fused.groups, merged)
        if fused.transposed:
            layout = Phases(fused.stride, fused.dilation, fused.groups, merged)
        return self.packer.pack_taps(fused.weight, fused.weight_params, problem.n, layout)

    def geometry(self, problem: ConvolutionProblem) -> list[Argument]:
        """Return the kernel size and the settings."""
        return settings_of(problem, problem.fused.groups // _merged(problem))


def _check_channels(problem: ConvolutionProblem) -> Refusal | None:
    return Refusal("every group has one input channel") if problem.is_depthwise else None


def _merged(problem: ConvolutionProblem) -> int:
    """Return how many groups are computed as one."""
    groups = problem.fused.groups
    return groups_to_merge(groups, problem.n // groups, problem.k)
