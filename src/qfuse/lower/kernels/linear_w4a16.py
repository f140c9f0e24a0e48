"""qfuse's own weight-only linear: float activations, weights that stay four bits in memory."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.groups import fits_four_bits
from qfuse.lower.operands.weight_only import WeightOnlyLinear, zero_points_of
from qfuse.lower.problems.linear import LinearProblem

_BITS = 4
_MOST_ZERO = 15


@dataclass(frozen=True, slots=True)
class LinearW4A16(WeightOnlyLinear):
    """Float activations and weights of at most 16 numbers, in groups along their inputs or not."""

    name: str = "qfuse.linear_w4a16"
    bits: int = _BITS

    def check(self, problem: LinearProblem) -> Refusal | None:
        """Refuse other weights."""
        return _check_codes(problem)


def _check_codes(problem: LinearProblem) -> Refusal | None:
    stored, params = problem.weight, problem.fused.weight_params
    assert stored is not None, "it is a constant"
    assert params is not None, "checked before"
    if not fits_four_bits(stored):
        return Refusal("the weight has numbers more than 15 apart, which four bits do not hold")
    zero, _ = zero_points_of(stored, params, _BITS)
    if zero.numel() and not 0 <= int(zero.min()) <= int(zero.max()) <= _MOST_ZERO:
        return Refusal("the weight has a zero point that is none of its 16 codes")
    return None
