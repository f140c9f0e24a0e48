"""qfuse's own int8 depthwise convolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.refusal import Refusal
from qfuse.kernels.pack_convolution import convolution_sums, pack_depthwise
from qfuse.lower.operands.int8_convolution import ChannelConvolution
from qfuse.lower.operands.packing import Packed
from qfuse.lower.problems.conditions import Condition
from qfuse.lower.problems.convolution import ConvolutionProblem


@dataclass(frozen=True, slots=True)
class Taps:
    """The taps of every channel."""

    def pack(self, weight: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """Pack an int8 weight."""
        del zero_point
        return pack_depthwise(weight)

    def sums(self, weight: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """Sum the weight minus its zero point for every output channel."""
        return convolution_sums(weight, zero_point)


@dataclass(frozen=True, slots=True)
class ConvolutionDepthwise(ChannelConvolution):
    """One input channel per group; 8-bit activations and weights as in the general kernel."""

    name: str = "qfuse.convolution_depthwise_w8a8"

    @property
    def on_geometry(self) -> tuple[Condition[ConvolutionProblem], ...]:
        """Groups of one input channel."""
        return (Condition("every group has one input channel", _check_channels),)

    def pack(self, problem: ConvolutionProblem) -> Packed:
        """Pack the taps of every channel."""
        fused = problem.fused
        assert fused.weight_params is not None, "accepted without weight params"
        return self.packer.pack_taps(fused.weight, fused.weight_params, problem.n, Taps())

    def geometry(self, problem: ConvolutionProblem) -> list[Argument]:
        """Return the kernel size and the settings."""
        fused = problem.fused
        settings = (problem.kernel, fused.stride, fused.padding, fused.dilation)
        return [list(setting) for setting in settings]


def _check_channels(problem: ConvolutionProblem) -> Refusal | None:
    if problem.is_depthwise:
        return None
    if problem.fused.transposed:
        return Refusal("it is transposed")
    return Refusal(f"it has {problem.fused.groups} groups for {problem.channels} channels")
