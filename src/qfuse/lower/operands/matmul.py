"""Operands of an int8 product of two activations: which the kernel takes, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qfuse.cost.sizes import SizeRange, at_points
from qfuse.cost.work import ComputeKind, Work, WorkRange
from qfuse.ir.dtypes import BYTES
from qfuse.ir.ops.views import QuantParams, shape_of, tensor_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.element import Element
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import Size, is_row_major, same_size
from qfuse.lower.operands.checks import stored_name_of
from qfuse.lower.operands.product_conditions import COMPUTED_IN_FLOAT, parameter_conditions
from qfuse.lower.problems.conditions import Condition, on
from qfuse.lower.problems.matmul import MatmulProblem

_COLUMNS, _ROWS = -1, -2

# Measured: bytes are rearranged at a quarter of the speed of a copy, and allocating and filling
# what belongs to the packed operand takes as long as three calls.
_PACKING_PASSES = 4
_PACKING_CALLS = 3


@dataclass(frozen=True, slots=True)
class _Operand:
    """An operand: its parameters, its shape, and the axis that is summed."""

    params: QuantParams | None
    shape: Sequence[Size]
    summed: int

    @property
    def given(self) -> QuantParams:
        """The parameters of a quantized operand."""
        assert self.params is not None, "checked before"
        return self.params


def _left(problem: MatmulProblem) -> _Operand:
    return _Operand(problem.fused.x_params, shape_of(problem.fused.x), _COLUMNS)


def _right(problem: MatmulProblem) -> _Operand:
    return _Operand(problem.fused.other_params, shape_of(problem.fused.other), _ROWS)


def _given(operand: _Operand) -> QuantParams:
    return operand.given


def _operand_conditions(name: str) -> tuple[Condition[_Operand], ...]:
    """Return the conditions of 8-bit integers with scales outside of the axis that is summed."""
    return (
        Condition(f"the {name} is quantized", lambda one: _check_quantized(one, name)),
        Condition(f"the {name} has 8 bits", lambda one: _check_stored(one, name)),
        Condition(
            f"no scale of the {name} differs within a sum", lambda one: _check_summed(one, name)
        ),
        Condition(f"the scales of the {name} broadcast", lambda one: _check_blocks(one, name)),
        *on(_given, parameter_conditions(name)),
    )


def _check_quantized(operand: _Operand, name: str) -> Refusal | None:
    return Refusal(f"the {name} is not quantized") if operand.params is None else None


def _check_stored(operand: _Operand, name: str) -> Refusal | None:
    spec = operand.given.spec
    if spec.dtype in BYTES and spec.element is Element.WHOLE:
        return None
    return Refusal(f"the {name} is stored as {stored_name_of(spec)}")


def _check_summed(operand: _Operand, name: str) -> Refusal | None:
    spec = operand.given.spec
    if covers(spec.block[operand.summed], operand.shape[operand.summed]):
        return None
    text = f"the {name} is scaled in blocks of {spec.block_text()}, along the axis that is summed"
    return Refusal(text)


def _check_blocks(operand: _Operand, name: str) -> Refusal | None:
    spec = operand.given.spec
    # The kernel broadcasts scales: along each axis there is one, or one per index.
    sizes = zip(spec.block, operand.shape, strict=True)
    if all(b == 1 or covers(b, size) or same_size(size, 1) for b, size in sizes):
        return None
    return Refusal(f"the {name} is scaled in blocks of {spec.block_text()}")


def _check_result(problem: MatmulProblem) -> Refusal | None:
    if is_row_major(tensor_of(problem.fused.node)):
        return None
    return Refusal("the result is not contiguous")


MATMUL_CONDITIONS: tuple[Condition[MatmulProblem], ...] = (
    COMPUTED_IN_FLOAT,
    Condition("the result is contiguous", _check_result),
    *on(_left, _operand_conditions("left operand")),
    *on(_right, _operand_conditions("right operand")),
)
"""The kernel reads both operands."""


def int8_work(problem: MatmulProblem, out_bits: int) -> list[WorkRange]:
    """Return the work of the kernel, which packs the right operand and then multiplies.

    Args:
        problem: The product.
        out_bits: Bits of an element of the result.
    """

    def packing(right: int) -> Work:
        moved = (float(right),) * _PACKING_PASSES
        return Work(reads=moved, writes=moved, kernel_calls=_PACKING_CALLS)

    product = matmul_work(problem, ComputeKind.INT8, (8, out_bits))
    return [at_points(packing, problem.right), product]


def matmul_work(problem: MatmulProblem, kind: ComputeKind, bits: tuple[int, int]) -> WorkRange:
    """Return the work of a product with operands and results of a number of bits."""
    read, written = bits

    def build(rows: int, n: int, k: int, firsts: int, left: int, right: int) -> Work:
        return Work(
            flops=2.0 * rows * n * k,
            kind=kind,
            reads=(left * read / 8, right * read / 8),
            writes=(rows * n * written / 8,),
            # No rows have no first rows.
            one_row_flops=2.0 * min(rows, firsts) * n * k,
        )

    sizes: tuple[SizeRange, ...] = (
        *(problem.rows, problem.n, problem.k, problem.first_rows),
        *(problem.left, problem.right),
    )
    return at_points(build, *sizes)
