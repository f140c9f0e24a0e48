"""Checks of weights of kernels that sum products of 8-bit integers."""

from __future__ import annotations

from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.refusal import Refusal
from qfuse.kernels.accumulator import MOST_PRODUCTS, MOST_PRODUCTS_WITH_ZERO
from qfuse.lower.operands.packing import signed_zero_point
from qfuse.lower.operands.product_conditions import (
    parameter_conditions,
    weight_of,
    weight_params,
)
from qfuse.lower.problems.conditions import Condition, on
from qfuse.lower.problems.product import WeightedProblem


def _check_stored(problem: WeightedProblem) -> Refusal | None:
    stored = weight_params(problem).spec.dtype
    return None if stored in BYTES else Refusal(f"the weight is stored as {stored}")


def _check_constants(problem: WeightedProblem) -> Refusal | None:
    params = weight_params(problem)
    parts = (problem.fused.weight, params.scale, params.zero_point)
    if any(p is not None and constant_of(p) is None for p in parts):
        return Refusal("the weight or its parameters are computed at run time")
    return None


def _check_depth(problem: WeightedProblem) -> Refusal | None:
    # uint8 weights are packed as int8, which gives them a zero point.
    has_zero = signed_zero_point(weight_of(problem), weight_params(problem)) is not None
    most = MOST_PRODUCTS_WITH_ZERO if has_zero else MOST_PRODUCTS
    if problem.k > most:
        return Refusal(f"sums of {problem.k} products could overflow; the limit is {most}")
    return None


INT8_WEIGHT: tuple[Condition[WeightedProblem], ...] = (
    Condition("the weight has 8 bits", _check_stored),
    Condition("the weight and its parameters are constants", _check_constants),
    *on(weight_params, parameter_conditions("weight")),
    Condition("no sum of products can overflow", _check_depth),
)
"""The weight is quantized to constant 8-bit integers; its granularity is another condition."""
