"""qfuse's own weight-only convolution: float activations, packed 8-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import BYTES, FLOAT8
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.weight_only_convolution import WeightOnlyConvolution


@dataclass(frozen=True, slots=True)
class ConvolutionW8A16(WeightOnlyConvolution):
    """Float activations, and 8-bit weights, grouped or not."""

    floats: ClassVar[tuple[torch.dtype, ...]] = FLOAT8

    name: str = "qfuse.convolution_w8a16"
    bits: int = 8

    def check(self, stored: torch.Tensor) -> Refusal | None:
        """Refuse weights of other than 8 bits."""
        if stored.dtype in (*BYTES, *FLOAT8):
            return None
        return Refusal(f"the weight is stored as {stored.dtype}")
