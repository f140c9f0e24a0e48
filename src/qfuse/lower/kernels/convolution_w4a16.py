"""qfuse's own weight-only convolution: float activations, packed 4-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.groups import check_four_bits
from qfuse.lower.operands.product_conditions import weight_of
from qfuse.lower.operands.weight_only_convolution import WeightOnlyConvolution
from qfuse.lower.problems.conditions import Condition
from qfuse.lower.problems.convolution import ConvolutionProblem


@dataclass(frozen=True, slots=True)
class ConvolutionW4A16(WeightOnlyConvolution):
    """Float activations, and weights with at most 16 distinct values, grouped or not."""

    name: str = "qfuse.convolution_w4a16"
    bits: int = 4

    @property
    def fits(self) -> Condition[ConvolutionProblem]:
        """Values that fit 4 bits."""
        return Condition("the values of the weight fit four bits", _check_span)


def _check_span(problem: ConvolutionProblem) -> Refusal | None:
    return check_four_bits(weight_of(problem))
