"""qfuse's own int8 linear: quantized inputs, with scales and epilogue fused into the matmul."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import (
    BYTES,
    channel_granularity,
    check_activation,
    check_bias,
    check_edge,
    check_zero_point,
    scale_vector,
)
from qfuse.lower.operands.int8_linear import Int8Linear
from qfuse.lower.operands.packing import signed_zero_point
from qfuse.lower.problems.linear import LinearProblem
from qfuse.rewrite.prelude import Rewriter

# The accumulator is int32: this many products of 8-bit values cannot overflow it.
_MOST_K = 1 << 16
_MOST_K_WITH_ZERO = 1 << 15


@dataclass(frozen=True, slots=True)
class LinearW8A8(Int8Linear):
    """8-bit activations per tensor or per row, 8-bit weights per tensor or output channel."""

    name: str = "qfuse.linear_w8a8"
    weight_bits: int = 8

    def check(self, problem: LinearProblem) -> Refusal | None:
        """Refuse unsupported operands, and sums that could overflow."""
        return check_activation(problem) or _check_weight(problem) or check_bias(problem)

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
    if isinstance(granularity, Refusal):
        return granularity
    params = problem.fused.weight_params
    assert params is not None, "a granularity needs params"
    if params.spec.dtype not in BYTES:
        return Refusal(f"the weight is stored as {params.spec.dtype}")
    parts = (problem.fused.weight, params.scale, params.zero_point)
    if any(p is not None and constant_of(p) is None for p in parts):
        return Refusal("the weight or its parameters are computed at run time")
    return (
        check_edge(params, "weight") or check_zero_point(params, "weight") or _check_depth(problem)
    )


def _check_depth(problem: LinearProblem) -> Refusal | None:
    stored, params = problem.weight, problem.fused.weight_params
    assert stored is not None, "it is a constant"
    assert params is not None, "a granularity needs params"
    # uint8 weights are packed as int8, which gives them a zero point.
    most = _MOST_K if signed_zero_point(stored, params) is None else _MOST_K_WITH_ZERO
    if problem.k > most:
        return Refusal(f"{problem.k} input features could overflow its sums; the limit is {most}")
    return None
