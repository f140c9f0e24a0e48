"""qfuse's linears with weights of four bits, and with scales that change along the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import dtype_range
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import (
    BYTES,
    check_activation,
    check_bias,
    check_edge,
    check_zero_point,
    rows_share_scale,
)
from qfuse.lower.operands.groups import first_code, fits_four_bits, group_count
from qfuse.lower.operands.int8_linear import Int8Linear
from qfuse.lower.problems.linear import LinearProblem
from qfuse.rewrite.prelude import Rewriter

_FOUR = 4
# Sums of a group are 32 bits wide, and so are products with its zero point.
_MOST_IN_GROUP = 1 << 15
# What a group costs beside its products, as that many more input features: to scale its sums takes
# about as long as 12 products, and its scale and sum are as many bytes as 12 codes of four bits.
_GROUP_COST = 12


@dataclass(frozen=True, slots=True)
class LinearGrouped(Int8Linear):
    """8-bit activations per tensor or per row, weights of four bits or in groups.

    Weights of four bits are at most 16 numbers, in groups or not; weights of eight bits are in
    groups.

    Attributes:
        weight_bits: Of a weight: 4 or 8.
    """

    weight_bits: Literal[4, 8]

    @property
    def name(self) -> str:
        """What the report calls it."""
        return "qfuse.linear_w4a8" if self.weight_bits == _FOUR else "qfuse.linear_w8a8_grouped"

    def check(self, problem: LinearProblem) -> Refusal | None:
        """Refuse other operands, and sums that could overflow."""
        refusal = check_activation(problem) or check_bias(problem) or _check_weight(problem)
        if refusal is not None:
            return refusal
        return _check_codes(problem) if self.weight_bits == _FOUR else _check_bytes(problem)

    def depth(self, problem: LinearProblem) -> int:
        """Return the input features, and what the groups cost besides."""
        params = problem.fused.weight_params
        assert params is not None, "checked before"
        groups = group_count(params.spec, problem.k)
        assert isinstance(groups, int), "checked before"
        # One group is scaled behind all products, as kernels without groups do it.
        return problem.k + (groups * _GROUP_COST if groups > 1 else 0)

    def weight_operands(
        self, problem: LinearProblem, rw: Rewriter, *, halves: bool
    ) -> list[Argument]:
        """Add packed weight, sums, scales and zero points of the groups."""
        weight, params = problem.fused.weight, problem.fused.weight_params
        assert params is not None, "accepted without weight params"
        four = self.weight_bits == _FOUR
        packed = self.packer.pack_grouped(weight, params, four=four, halves=halves)
        name, zero = weight.target, packed.zero_point
        return [
            rw.constant(packed.weight, f"{name}_packed"),
            rw.constant(packed.sums, f"{name}_sums"),
            rw.constant(packed.scale, f"{name}_scales"),
            None if zero is None else rw.constant(zero, f"{name}_zeros"),
            problem.n,
        ]


def _check_weight(problem: LinearProblem) -> Refusal | None:
    """Refuse weights that neither kernel takes."""
    fused = problem.fused
    params = fused.weight_params
    if params is None:
        return Refusal("the weight is not quantized")
    if params.spec.dtype.is_floating_point:
        return Refusal(f"the weight is stored as {params.spec.dtype}")
    if any(constant_of(part) is None for part in (fused.weight, *params.tensors)):
        return Refusal("the weight or its parameters are computed at run time")
    return check_edge(params, "weight") or _check_groups(problem, params)


def _check_groups(problem: LinearProblem, params: QuantParams) -> Refusal | None:
    groups = group_count(params.spec, problem.k)
    if isinstance(groups, Refusal):
        return groups
    length = problem.k // groups
    if length > _MOST_IN_GROUP:
        return Refusal(f"{length} products could overflow its sums, {_MOST_IN_GROUP} cannot")
    return None


def _check_codes(problem: LinearProblem) -> Refusal | None:
    stored, params = problem.weight, problem.fused.weight_params
    assert stored is not None, "it is a constant"
    assert params is not None, "checked before"
    if not fits_four_bits(stored):
        return Refusal("the weight has numbers more than 15 apart, which four bits do not hold")
    least = first_code(stored, params.spec)
    low, high = dtype_range(torch.int8)
    if any(not low <= zero - least <= high for zero in _extremes(params)):
        return Refusal("the weight has a zero point too far from its numbers for 8 bits")
    return None


def _extremes(params: QuantParams) -> tuple[int, ...]:
    zero = None if params.zero_point is None else constant_of(params.zero_point)
    if zero is None or not zero.numel():
        return (0,)
    return int(zero.min()), int(zero.max())


def _check_bytes(problem: LinearProblem) -> Refusal | None:
    params = problem.fused.weight_params
    assert params is not None, "checked before"
    if params.spec.dtype not in BYTES:
        return Refusal(f"the weight is stored as {params.spec.dtype}")
    if rows_share_scale((1, params.spec.block[1]), (problem.n, problem.k)):
        return Refusal("the weight's scales do not change along its inputs")
    return check_zero_point(params, "weight")
