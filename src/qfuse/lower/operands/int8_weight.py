"""Checks of weights of kernels that sum products of 8-bit integers."""

from __future__ import annotations

from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.refusal import Refusal
from qfuse.kernels.accumulator import MOST_PRODUCTS, MOST_PRODUCTS_WITH_ZERO
from qfuse.lower.operands.checks import check_qparams, check_zero_point
from qfuse.lower.operands.packing import signed_zero_point
from qfuse.lower.problems.product import WeightedProblem


def check_int8_weight(problem: WeightedProblem) -> Refusal | None:
    """Refuse weights that are not constant 8-bit integers, and sums that could overflow.

    The granularity is checked by the caller.
    """
    weight, params = problem.fused.weight, problem.fused.weight_params
    if params is None:
        return Refusal("the weight is not quantized")
    if params.spec.dtype not in BYTES:
        return Refusal(f"the weight is stored as {params.spec.dtype}")
    parts = (weight, params.scale, params.zero_point)
    if any(p is not None and constant_of(p) is None for p in parts):
        return Refusal("the weight or its parameters are computed at run time")
    return (
        check_qparams(params, "weight")
        or check_zero_point(params, "weight")
        or _check_depth(problem)
    )


def _check_depth(problem: WeightedProblem) -> Refusal | None:
    stored, params = problem.weight, problem.fused.weight_params
    assert stored is not None, "it is a constant"
    assert params is not None, "a granularity needs params"
    # uint8 weights are packed as int8, which gives them a zero point.
    has_zero = signed_zero_point(stored, params) is not None
    most = MOST_PRODUCTS_WITH_ZERO if has_zero else MOST_PRODUCTS
    if problem.k > most:
        return Refusal(f"sums of {problem.k} products could overflow; the limit is {most}")
    return None
