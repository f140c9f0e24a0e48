"""qfuse's own weight-only linear: float activations, packed 4-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.groups import check_four_bits
from qfuse.lower.operands.product_conditions import weight_of, weight_params
from qfuse.lower.operands.weight_only_linear import WeightOnlyLinear, zero_points_of
from qfuse.lower.problems.conditions import Condition
from qfuse.lower.problems.linear import LinearProblem

_BITS = 4
_MOST_ZERO = 15


@dataclass(frozen=True, slots=True)
class LinearW4A16(WeightOnlyLinear):
    """Float activations, and weights with at most 16 distinct values, grouped or not."""

    name: str = "qfuse.linear_w4a16"
    bits: int = _BITS

    @property
    def requires(self) -> tuple[Condition[LinearProblem], ...]:
        """Values and zero points that fit 4 bits."""
        return _REQUIRES


def _check_span(problem: LinearProblem) -> Refusal | None:
    return check_four_bits(weight_of(problem))


def _check_zero_points(problem: LinearProblem) -> Refusal | None:
    zero, _ = zero_points_of(weight_of(problem), weight_params(problem), _BITS)
    # The kernel ignores all but four bits of a zero point.
    if zero.numel() and not 0 <= int(zero.min()) <= int(zero.max()) <= _MOST_ZERO:
        return Refusal("the weight has a zero point outside its 16 codes")
    return None


_REQUIRES: tuple[Condition[LinearProblem], ...] = (
    Condition("the values of the weight fit four bits", _check_span),
    Condition("the zero points of the codes fit four bits", _check_zero_points),
)
