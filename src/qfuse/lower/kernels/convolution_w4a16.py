"""qfuse's own weight-only convolution: float activations, packed 4-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.groups import check_four_bits
from qfuse.lower.operands.weight_only_convolution import WeightOnlyConvolution


@dataclass(frozen=True, slots=True)
class ConvolutionW4A16(WeightOnlyConvolution):
    """Float activations, and weights with at most 16 distinct values, grouped or not."""

    name: str = "qfuse.convolution_w4a16"
    bits: int = 4

    def check(self, stored: torch.Tensor) -> Refusal | None:
        """Refuse weights that do not fit 4 bits."""
        return check_four_bits(stored)
