"""Shared code of qfuse's kernels of float activations and packed weights: checks and operands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.cost.work import ComputeKind
from qfuse.ir.dtypes import FLOAT8
from qfuse.ir.ops import library as ops
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import check_stored_weight
from qfuse.lower.operands.epilogue import claimed_dtype, epilogue_operands, kernel_epilogue
from qfuse.lower.operands.own_kernel import PackingKernel
from qfuse.lower.operands.product_conditions import WEIGHT_CONSTANT, WEIGHT_QUANTIZED, weight_params
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition
from qfuse.lower.problems.product import WeightedProblem
from qfuse.rewrite.prelude import Rewriter

COMPUTE_KINDS = {
    torch.float32: ComputeKind.F32,
    torch.bfloat16: ComputeKind.BF16,
    torch.float16: ComputeKind.F32,
}
"""The arithmetic of weight-only kernels, by the dtype of the activation."""


@dataclass(frozen=True, slots=True)
class WeightOnlyOperand:
    """A packed weight and its quantization parameters, in the layout of the kernels.

    Attributes:
        packed: The packed weight.
        scale: float32 ``[ceil(N / 64), groups, 64]``.
        zero_point: Same shape, in the dtype of the values; ``None`` if all are the kernels'
            default.
        offset: Same shape, float32; ``None`` if there are none.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    offset: torch.Tensor | None


class WeightOnlyKernel(PackingKernel):
    """A product of float activations and a packed weight, as the op ``qfuse::name``."""

    __slots__ = ()

    floats: ClassVar[tuple[torch.dtype, ...]] = ()
    """The float dtypes of weights that it knows."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits per packed weight."""

    def weight_arguments(
        self, problem: WeightedProblem, weight: WeightOnlyOperand, rw: Rewriter
    ) -> list[Argument]:
        """Return the activation, and the packed weight with its scales and zero points."""
        zero, name = weight.zero_point, problem.fused.weight.target
        x, params = problem.fused.x, problem.fused.x_params
        if params is not None:
            # It is expanded with the other dequantizes.
            x = rw.call(ops.dequantize, *params.call_args(x))
        return [
            x,
            rw.constant(weight.packed, f"{name}_packed"),
            rw.constant(weight.scale, f"{name}_scales"),
            None if zero is None else rw.constant(zero, f"{name}_zeros"),
        ]

    def epilogue_arguments(
        self, problem: WeightedProblem, claim: Claim, rw: Rewriter
    ) -> list[Argument]:
        """Return the claimed epilogue, and the dtypes of the weight and of the result."""
        params, steps = problem.fused.weight_params, kernel_epilogue(problem, claim)
        assert params is not None, "checked before"
        return [
            epilogue_operands(steps, rw),
            steps.text,
            params.spec.arithmetic.compute,
            claimed_dtype(problem, claim),
        ]


def _check_float(problem: WeightedProblem) -> Refusal | None:
    given = problem.fused.x_params
    # No kernel multiplies activations of float8 as they are.
    if problem.in_float or given is None or given.spec.dtype in FLOAT8:
        return None
    return Refusal("the activation is quantized")


def _check_rounding(problem: WeightedProblem) -> Refusal | None:
    compute = weight_params(problem).spec.arithmetic.compute
    # Kernels do not round weights to bfloat16; in a float32 product that is visible.
    if compute is torch.bfloat16 and problem.float_dtype is torch.float32:
        return Refusal("the weight is dequantized in bfloat16 and multiplied in float32")
    return None


_FLOAT: Condition[WeightedProblem] = Condition("the activation is not quantized", _check_float)
_ROUNDING: Condition[WeightedProblem] = Condition(
    "the weight is not rounded to bfloat16 before a float32 product", _check_rounding
)


def operand_conditions(
    op: str, floats: Collection[torch.dtype]
) -> tuple[Condition[WeightedProblem], ...]:
    """Return the conditions on the activation, on dtypes, and on a weight that is constant.

    Args:
        op: What the product is called in a reason.
        floats: The float dtypes of weights that the kernel knows.
    """

    def check_computed(problem: WeightedProblem) -> Refusal | None:
        if problem.float_dtype in COMPUTE_KINDS:
            return None
        return Refusal(f"the {op} computes in {problem.float_dtype}")

    return (
        _FLOAT,
        Condition("kernels compute in the dtype of the product", check_computed),
        WEIGHT_QUANTIZED,
        _ROUNDING,
        Condition(
            "kernels know how the weight is stored",
            lambda problem: check_stored_weight(weight_params(problem), floats),
        ),
        WEIGHT_CONSTANT,
    )
