"""qfuse's own weight-only linear: float activations, packed 4-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.groups import check_four_bits
from qfuse.lower.operands.weight_only_linear import WeightOnlyLinear, zero_points_of
from qfuse.lower.problems.linear import LinearProblem

_BITS = 4
_MOST_ZERO = 15


@dataclass(frozen=True, slots=True)
class LinearW4A16(WeightOnlyLinear):
    """Float activations, and weights with at most 16 distinct values, grouped or not."""

    name: str = "qfuse.linear_w4a16"
    bits: int = _BITS

    def check(self, problem: LinearProblem) -> Refusal | None:
        """Refuse weights that do not fit 4 bits."""
        return _check_values(problem)


def _check_values(problem: LinearProblem) -> Refusal | None:
    stored, params = problem.weight, problem.fused.weight_params
    assert stored is not None, "it is a constant"
    assert params is not None, "checked before"
    refusal = check_four_bits(stored)
    if refusal is not None:
        return refusal
    zero, _ = zero_points_of(stored, params, _BITS)
    # The kernel ignores all but four bits of a zero point.
    if zero.numel() and not 0 <= int(zero.min()) <= int(zero.max()) <= _MOST_ZERO:
        return Refusal("the weight has a zero point outside its 16 codes")
    return None
