"""qfuse's own weight-only convolution: float activations, packed 8-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import BYTES, FLOAT8
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.product_conditions import weight_of
from qfuse.lower.operands.weight_only_convolution import WeightOnlyConvolution
from qfuse.lower.problems.conditions import Condition
from qfuse.lower.problems.convolution import ConvolutionProblem


@dataclass(frozen=True, slots=True)
class ConvolutionW8A16(WeightOnlyConvolution):
    """Float activations, and 8-bit weights, grouped or not."""

    floats: ClassVar[tuple[torch.dtype, ...]] = FLOAT8

    name: str = "qfuse.convolution_w8a16"
    bits: int = 8

    @property
    def fits(self) -> Condition[ConvolutionProblem]:
        """A weight of 8 bits."""
        return Condition("the weight has 8 bits", _check_stored)


def _check_stored(problem: ConvolutionProblem) -> Refusal | None:
    stored = weight_of(problem).dtype
    if stored in (*BYTES, *FLOAT8):
        return None
    return Refusal(f"the weight is stored as {stored}")
