"""The problem that kernels see for a fused product of two activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from qfuse.cost import size_range
from qfuse.cost.sizes import SizeRange
from qfuse.ir.graph.stage_graph import SymbolRange
from qfuse.ir.ops.matmul import FusedMatmul
from qfuse.ir.ops.views import shape_of
from qfuse.ir.sizes import product
from qfuse.lower.problems.product import ProductProblem
from qfuse.lower.problems.span import MATMUL, Span


@dataclass(frozen=True, slots=True)
class MatmulProblem(ProductProblem):
    """A fused product of two activations as kernels see it.

    Attributes:
        left: Elements of the left operand, ``[*batch, M, K]``.
        right: Elements of the right operand, ``[*batch, K, N]``.
        rows: Rows of the result in all batch entries: its elements are ``rows * n``.
        n: Columns of the result.
        k: Products per element of the result.
        first_rows: The batch entries of the result, each of which has a first row.
    """

    fused: FusedMatmul
    left: SizeRange
    right: SizeRange
    rows: SizeRange
    n: SizeRange
    k: SizeRange
    first_rows: SizeRange

    rule: ClassVar[str] = "lower-matmul"

    @property
    def span(self) -> Span:
        """A matmul."""
        return MATMUL

    @property
    def outputs(self) -> SizeRange:
        """The elements of the result."""
        return self.rows * self.n


def matmul_problem(fused: FusedMatmul, symbols: Mapping[str, SymbolRange]) -> MatmulProblem:
    """Describe ``fused`` for the kernels, with the ranges of its dynamic sizes."""
    x, other, y = shape_of(fused.x), shape_of(fused.other), shape_of(fused.node)
    sizes = (product(x), product(other), product(y[:-1]), y[-1], x[-1], product(y[:-2]))
    ranges = [size_range(size, symbols) for size in sizes]
    return MatmulProblem(fused, fused.float_dtype, *ranges)
