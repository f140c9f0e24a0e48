"""qfuse's own linears with 4-bit weights, or with grouped weight scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx.node import Argument

from qfuse.cost.work import GROUP_PRODUCTS
from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.block import rows_share_scale
from qfuse.ir.quant.spec import dtype_range
from qfuse.ir.refusal import Refusal
from qfuse.kernels.accumulator import MOST_PRODUCTS_WITH_ZERO
from qfuse.lower.operands.checks import (
    check_stored_weight,
    check_zero_point,
)
from qfuse.lower.operands.groups import check_four_bits, first_value, group_count
from qfuse.lower.operands.int8_linear import Int8Linear
from qfuse.lower.operands.linear_conditions import SCALED_GROUPS, SCALED_ROWS
from qfuse.lower.operands.product_conditions import (
    ACTIVATION,
    BIAS,
    WEIGHT_CONSTANT,
    WEIGHT_QUANTIZED,
    scale_conditions,
    weight_of,
    weight_params,
)
from qfuse.lower.problems.conditions import Condition, on
from qfuse.lower.problems.linear import LinearProblem
from qfuse.rewrite.prelude import Rewriter

_FOUR = 4


@dataclass(frozen=True, slots=True)
class LinearGrouped(Int8Linear):
    """8-bit activations per tensor or per row, 4-bit or grouped weights.

    4-bit weights have at most 16 distinct values, grouped or not; 8-bit weights are grouped.

    Attributes:
        weight_bits: Bits per weight: 4 or 8.
    """

    weight_bits: Literal[4, 8]

    @property
    def name(self) -> str:
        """The name in the report."""
        return "qfuse.linear_w4a8" if self.weight_bits == _FOUR else "qfuse.linear_w8a8_grouped"

    @property
    def requires(self) -> tuple[Condition[LinearProblem], ...]:
        """Supported operands, and sums that cannot overflow."""
        return (*_REQUIRES, *(_VALUES if self.weight_bits == _FOUR else _BYTES))

    def depth(self, problem: LinearProblem) -> int:
        """Return the input features, plus the overhead of the groups."""
        params = problem.fused.weight_params
        assert params is not None, "checked before"
        groups = group_count(params.spec, problem.k)
        assert isinstance(groups, int), "checked before"
        # A single group is scaled after the matmul, as in the kernels without groups.
        # The scale and the sum of a group have as many bytes as 4-bit values of these products.
        return problem.k + (groups * GROUP_PRODUCTS if groups > 1 else 0)

    def weight_operands(
        self, problem: LinearProblem, rw: Rewriter, *, halves: bool
    ) -> list[Argument]:
        """Emit the packed weight and the sums, scales and zero points of its groups."""
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


def _check_integers(problem: LinearProblem) -> Refusal | None:
    return check_stored_weight(weight_params(problem), ())


def _check_length(problem: LinearProblem) -> Refusal | None:
    groups = group_count(weight_params(problem).spec, problem.k)
    assert isinstance(groups, int), "checked before"
    length = problem.k // groups
    if length > MOST_PRODUCTS_WITH_ZERO:
        return Refusal(
            f"{length} products could overflow its sums; the limit is {MOST_PRODUCTS_WITH_ZERO}"
        )
    return None


def _check_span(problem: LinearProblem) -> Refusal | None:
    return check_four_bits(weight_of(problem))


def _check_moved_zero_points(problem: LinearProblem) -> Refusal | None:
    params = weight_params(problem)
    least = first_value(weight_of(problem), params.spec)
    low, high = dtype_range(torch.int8)
    # Packing moves the least value to code 0, and the
    # zero points with it; the kernel has them in int8.
    if any(not low <= zero - least <= high for zero in _extremes(params)):
        return Refusal("the weight has a zero point too far from its values for 8 bits")
    return None


def _extremes(params: QuantParams) -> tuple[int, ...]:
    zero = None if params.zero_point is None else constant_of(params.zero_point)
    if zero is None or not zero.numel():
        # Without zero points, 0 is the zero point, and it moves too.
        return (0,)
    return int(zero.min()), int(zero.max())


def _check_bytes(problem: LinearProblem) -> Refusal | None:
    stored = weight_params(problem).spec.dtype
    return None if stored in BYTES else Refusal(f"the weight is stored as {stored}")


def _check_grouped(problem: LinearProblem) -> Refusal | None:
    block = weight_params(problem).spec.block
    # One group is the ordinary kernel's case, which scales a sum once.
    if rows_share_scale((1, block[1]), (problem.n, problem.k)):
        return Refusal("the weight's scales are not grouped along its input features")
    return None


def _check_zero_point(problem: LinearProblem) -> Refusal | None:
    return check_zero_point(weight_params(problem), "weight")


_REQUIRES: tuple[Condition[LinearProblem], ...] = (
    *ACTIVATION,
    SCALED_ROWS,
    BIAS,
    WEIGHT_QUANTIZED,
    Condition("the weight is stored as integers", _check_integers),
    WEIGHT_CONSTANT,
    *on(weight_params, scale_conditions("weight")),
    SCALED_GROUPS,
    Condition("no sum of a group can overflow", _check_length),
)

# Both read the values of the weight, so they come last.
_VALUES: tuple[Condition[LinearProblem], ...] = (
    Condition("the values of the weight fit four bits", _check_span),
    Condition("the zero points of the codes fit 8 bits", _check_moved_zero_points),
)

_BYTES: tuple[Condition[LinearProblem], ...] = (
    Condition("the weight has 8 bits", _check_bytes),
    Condition("the weight has scales of groups of input features", _check_grouped),
    Condition("the weight's zero point is in the range of its dtype", _check_zero_point),
)
