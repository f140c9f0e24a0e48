"""qfuse's own weight-only linear: float activations, packed 8-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import BYTES, FLOAT8
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.product_conditions import weight_of, weight_params
from qfuse.lower.operands.weight_only_linear import WeightOnlyLinear, zero_points_of
from qfuse.lower.problems.conditions import Condition
from qfuse.lower.problems.linear import LinearProblem

_BITS = 8


@dataclass(frozen=True, slots=True)
class LinearW8A16(WeightOnlyLinear):
    """Float activations and 8-bit weights, grouped or not."""

    floats: ClassVar[tuple[torch.dtype, ...]] = FLOAT8

    name: str = "qfuse.linear_w8a16"
    bits: int = _BITS

    @property
    def requires(self) -> tuple[Condition[LinearProblem], ...]:
        """Values and the middle of their range in 8 bits."""
        return _REQUIRES


def _check_stored(problem: LinearProblem) -> Refusal | None:
    stored = weight_of(problem).dtype
    if stored in (*BYTES, *FLOAT8):
        return None
    return Refusal(f"the weight is stored as {stored}")


def _check_zero_points(problem: LinearProblem) -> Refusal | None:
    zero, _ = zero_points_of(weight_of(problem), weight_params(problem), _BITS)
    # Integer zero points have been checked by `check_zero_point`; the middle of a range has not.
    if zero.dtype is not torch.int8:
        return Refusal("the weight's float offsets are relative to a value outside the 8-bit range")
    return None


_REQUIRES: tuple[Condition[LinearProblem], ...] = (
    Condition("the weight has 8 bits", _check_stored),
    Condition("the zero points of the codes fit 8 bits", _check_zero_points),
)
