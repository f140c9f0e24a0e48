"""Operands of an int8 product of two activations: which the kernel takes, and their cost."""

from __future__ import annotations

from collections.abc import Sequence

from qfuse.cost.sizes import SizeRange, at_points
from qfuse.cost.work import ComputeKind, Work, WorkRange
from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.ops.views import QuantParams, shape_of, tensor_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.element import Element
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import Size, is_row_major, same_size
from qfuse.lower.operands.checks import check_qparams, check_zero_point, stored_name_of
from qfuse.lower.problems.matmul import MatmulProblem

_COLUMNS, _ROWS = -1, -2

# Measured: bytes are rearranged at a quarter of the speed of a copy, and allocating and filling
# what belongs to the packed operand takes as long as three calls.
_PACKING_PASSES = 4
_PACKING_CALLS = 3


def check_matmul(problem: MatmulProblem) -> Refusal | None:
    """Refuse operands that the kernel does not read."""
    fused = problem.fused
    if problem.float_dtype not in FLOATS:
        return Refusal(f"the product is computed in {dtype_name(problem.float_dtype)}")
    if not is_row_major(tensor_of(fused.node)):
        return Refusal("the result is not contiguous")
    return _check_operand(
        "left operand", fused.x_params, shape_of(fused.x), _COLUMNS
    ) or _check_operand("right operand", fused.other_params, shape_of(fused.other), _ROWS)


def _check_operand(
    name: str, params: QuantParams | None, shape: Sequence[Size], summed: int
) -> Refusal | None:
    """Refuse an operand that is not 8-bit integers with scales outside of the axis ``summed``."""
    if params is None:
        return Refusal(f"the {name} is not quantized")
    spec = params.spec
    if spec.dtype not in BYTES or spec.element is not Element.WHOLE:
        return Refusal(f"the {name} is stored as {stored_name_of(spec)}")
    if not covers(spec.block[summed], shape[summed]):
        text = (
            f"the {name} is scaled in blocks of {spec.block_text()}, along the axis that is summed"
        )
        return Refusal(text)
    # The kernel broadcasts scales: along each axis there is one, or one per index.
    sizes = zip(spec.block, shape, strict=True)
    if not all(b == 1 or covers(b, size) or same_size(size, 1) for b, size in sizes):
        return Refusal(f"the {name} is scaled in blocks of {spec.block_text()}")
    return check_qparams(params, name) or check_zero_point(params, name)


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
