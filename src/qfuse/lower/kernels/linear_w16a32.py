"""qfuse's own linear of float32 activations and float16 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.product_conditions import weight_of
from qfuse.lower.operands.weight_only_linear import WeightOnlyLinear
from qfuse.lower.problems.conditions import Condition
from qfuse.lower.problems.linear import LinearProblem


@dataclass(frozen=True, slots=True)
class LinearW16A32(WeightOnlyLinear):
    """float32 activations and weights that stay float16 in memory."""

    floats: ClassVar[tuple[torch.dtype, ...]] = (torch.float16,)

    name: str = "qfuse.linear_w16a32"
    bits: int = 16

    @property
    def requires(self) -> tuple[Condition[LinearProblem], ...]:
        """A float16 weight and float32 activations."""
        return _REQUIRES


def _check_stored(problem: LinearProblem) -> Refusal | None:
    stored = weight_of(problem).dtype
    return None if stored is torch.float16 else Refusal(f"the weight is stored as {stored}")


def _check_computed(problem: LinearProblem) -> Refusal | None:
    if problem.float_dtype is torch.float32:
        return None
    return Refusal(f"the linear computes in {problem.float_dtype}")


_REQUIRES: tuple[Condition[LinearProblem], ...] = (
    Condition("the weight is stored in float16", _check_stored),
    Condition("the linear computes in float32", _check_computed),
)
