"""qfuse's own weight-only linear: float activations, packed 8-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import BYTES, FLOAT8
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.weight_only_linear import WeightOnlyLinear, zero_points_of
from qfuse.lower.problems.linear import LinearProblem

_BITS = 8


@dataclass(frozen=True, slots=True)
class LinearW8A16(WeightOnlyLinear):
    """Float activations and 8-bit weights, grouped or not."""

    floats: ClassVar[tuple[torch.dtype, ...]] = FLOAT8

    name: str = "qfuse.linear_w8a16"
    bits: int = _BITS

    def check(self, problem: LinearProblem) -> Refusal | None:
        """Refuse weights of other than 8 bits."""
        return _check_bytes(problem)


def _check_bytes(problem: LinearProblem) -> Refusal | None:
    stored, params = problem.weight, problem.fused.weight_params
    assert stored is not None, "it is a constant"
    assert params is not None, "checked before"
    if stored.dtype not in (*BYTES, *FLOAT8):
        return Refusal(f"the weight is stored as {stored.dtype}")
    zero, _ = zero_points_of(stored, params, _BITS)
    # Integer zero points have been checked by `check_zero_point`; the middle of a range has not.
    if zero.dtype is not torch.int8:
        return Refusal("the weight's float offsets are relative to a value outside the 8-bit range")
    return None
