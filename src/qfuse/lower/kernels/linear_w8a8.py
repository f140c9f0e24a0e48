"""qfuse's own int8 linear: quantized inputs, with scales and epilogue fused into the matmul."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.lower.operands.checks import (
    scale_vector,
)
from qfuse.lower.operands.int8_linear import Int8Linear
from qfuse.lower.operands.int8_weight import INT8_WEIGHT
from qfuse.lower.operands.linear_conditions import SCALED_CHANNELS, SCALED_ROWS
from qfuse.lower.operands.product_conditions import ACTIVATION, BIAS, WEIGHT_QUANTIZED
from qfuse.lower.problems.conditions import Condition
from qfuse.lower.problems.linear import LinearProblem
from qfuse.rewrite.prelude import Rewriter


@dataclass(frozen=True, slots=True)
class LinearW8A8(Int8Linear):
    """8-bit activations per tensor or per row, 8-bit weights per tensor or output channel."""

    name: str = "qfuse.linear_w8a8"
    weight_bits: int = 8

    @property
    def requires(self) -> tuple[Condition[LinearProblem], ...]:
        """Bytes with one scale per row or output channel, and sums that cannot overflow."""
        return _REQUIRES

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


_REQUIRES: tuple[Condition[LinearProblem], ...] = (
    *ACTIVATION,
    SCALED_ROWS,
    WEIGHT_QUANTIZED,
    SCALED_CHANNELS,
    *INT8_WEIGHT,
    BIAS,
)
