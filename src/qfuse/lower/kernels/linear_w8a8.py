"""qfuse's own int8 linear: quantized inputs, with scales and epilogue fused into the matmul."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import (
    channel_granularity,
    check_activation,
    check_bias,
    check_rows,
    scale_vector,
)
from qfuse.lower.operands.int8_linear import Int8Linear
from qfuse.lower.operands.int8_weight import check_int8_weight
from qfuse.lower.problems.linear import LinearProblem
from qfuse.rewrite.prelude import Rewriter


@dataclass(frozen=True, slots=True)
class LinearW8A8(Int8Linear):
    """8-bit activations per tensor or per row, 8-bit weights per tensor or output channel."""

    name: str = "qfuse.linear_w8a8"
    weight_bits: int = 8

    def check(self, problem: LinearProblem) -> Refusal | None:
        """Refuse unsupported operands, and sums that could overflow."""
        return (
            check_activation(problem)
            or check_rows(problem)
            or _check_weight(problem)
            or check_bias(problem)
        )

    def weight_operands(
        self, problem: LinearProblem, rw: Rewriter, *, halves: bool
    ) -> list[Argument]:
        """Emit the packed weight, its sums, scale and zero point."""
        weight, params = problem.fused.weight, problem.fused.weight_params
        assert params is not None, "accepted without weight params"
        packed = self.packer.pack(weight, params, halves=halves)
        name, zero = weight.target, packed.zero_point
        return [
            rw.constant(packed.weight, f"{name}_packed"),
            rw.constant(packed.sums, f"{name}_sums"),
            scale_vector(params, torch.float32, problem.n, rw),
            None if zero is None else rw.constant(zero, f"{name}_zero"),
        ]


def _check_weight(problem: LinearProblem) -> Refusal | None:
    granularity = channel_granularity(problem)
    return granularity if isinstance(granularity, Refusal) else check_int8_weight(problem)
