"""Conditions that the kernels of several products have."""

from __future__ import annotations

from collections.abc import Collection

import torch

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import (
    COMPUTES,
    check_bias,
    check_constant_weight,
    check_integer_zero_point,
    check_scales,
    check_zero_point,
)
from qfuse.lower.problems.conditions import Condition, on
from qfuse.lower.problems.product import ProductProblem, WeightedProblem


def x_params(problem: ProductProblem) -> QuantParams:
    """Return the parameters of a quantized activation."""
    params = problem.fused.x_params
    assert params is not None, "checked before"
    return params


def weight_params(problem: WeightedProblem) -> QuantParams:
    """Return the parameters of a quantized weight."""
    params = problem.fused.weight_params
    assert params is not None, "checked before"
    return params


def weight_of(problem: WeightedProblem) -> torch.Tensor:
    """Return the quantized values of a constant weight."""
    stored = problem.weight
    assert stored is not None, "it is a constant"
    return stored


def scale_conditions(
    name: str, computes: Collection[torch.dtype] = COMPUTES
) -> tuple[Condition[QuantParams], ...]:
    """Return the conditions that ``check_qparams`` checks."""
    scales: Condition[QuantParams] = Condition(
        f"kernels know the {name}'s scales", lambda one: check_scales(one, name, computes)
    )
    return scales, _integer_zero_point(name)


def zero_point_conditions(name: str) -> tuple[Condition[QuantParams], ...]:
    """Return the conditions on zero points, which kernels have in the dtype of the values."""
    in_range: Condition[QuantParams] = Condition(
        f"the {name}'s zero point is in the range of its dtype",
        lambda one: check_zero_point(one, name),
    )
    return _integer_zero_point(name), in_range


def parameter_conditions(name: str) -> tuple[Condition[QuantParams], ...]:
    """Return the conditions on scales and zero points."""
    scales, _ = scale_conditions(name)
    return scales, *zero_point_conditions(name)


def _integer_zero_point(name: str) -> Condition[QuantParams]:
    return Condition(
        f"the {name}'s zero point is an integer",
        lambda one: check_integer_zero_point(one, name),
    )


def _check_quantized(problem: ProductProblem) -> Refusal | None:
    if problem.fused.x_params is not None:
        return None
    return Refusal("the activation is not quantized")


def _check_stored(problem: ProductProblem) -> Refusal | None:
    stored = x_params(problem).spec.dtype
    return None if stored in BYTES else Refusal(f"the activation is stored as {stored}")


def _check_computed(problem: ProductProblem) -> Refusal | None:
    if problem.float_dtype in FLOATS:
        return None
    return Refusal(f"the product is computed in {dtype_name(problem.float_dtype)}")


def _check_weight_quantized(problem: WeightedProblem) -> Refusal | None:
    if problem.fused.weight_params is not None:
        return None
    return Refusal("the weight is not quantized")


def _check_constants(problem: WeightedProblem) -> Refusal | None:
    return check_constant_weight(problem.fused.weight, weight_params(problem))


ACTIVATION_QUANTIZED: Condition[ProductProblem] = Condition(
    "the activation is quantized", _check_quantized
)

COMPUTED_IN_FLOAT: Condition[ProductProblem] = Condition(
    "the product is computed in a float dtype of at most 32 bits", _check_computed
)

ACTIVATION: tuple[Condition[ProductProblem], ...] = (
    ACTIVATION_QUANTIZED,
    Condition("the activation has 8 bits", _check_stored),
    COMPUTED_IN_FLOAT,
    *on(x_params, parameter_conditions("activation")),
)
"""The activation is one of 8-bit integers; its granularity is another condition."""

WEIGHT_QUANTIZED: Condition[WeightedProblem] = Condition(
    "the weight is quantized", _check_weight_quantized
)

WEIGHT_CONSTANT: Condition[WeightedProblem] = Condition(
    "the weight and its parameters are constants", _check_constants
)

BIAS: Condition[WeightedProblem] = Condition(
    "the bias has one element per output feature", check_bias
)
