"""qfuse's own linear of float32 activations and float16 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.weight_only_linear import WeightOnlyLinear
from qfuse.lower.problems.linear import LinearProblem


@dataclass(frozen=True, slots=True)
class LinearW16A32(WeightOnlyLinear):
    """float32 activations and weights that stay float16 in memory."""

    floats: ClassVar[tuple[torch.dtype, ...]] = (torch.float16,)

    name: str = "qfuse.linear_w16a32"
    bits: int = 16

    def check(self, problem: LinearProblem) -> Refusal | None:
        """Refuse other weights than float16, and other activations than float32."""
        stored = problem.weight
        assert stored is not None, "it is a constant"
        if stored.dtype is not torch.float16:
            return Refusal(f"the weight is stored as {stored.dtype}")
        if problem.float_dtype is not torch.float32:
            return Refusal(f"the linear computes in {problem.float_dtype}")
        return None
