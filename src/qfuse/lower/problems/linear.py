"""The problem that kernels see for a fused linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost import size_range
from qfuse.ir.graph.stage_graph import SymbolRange
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.views import shape_of
from qfuse.lower.problems.product import WeightedProblem
from qfuse.lower.problems.span import LINEAR, Span


@dataclass(frozen=True, slots=True)
class LinearProblem(WeightedProblem):
    """A fused linear as kernels see it: sizes, dtypes, and the view of the node.

    Its rows are the product of all axes of the activation but the last.
    """

    fused: FusedLinear

    rule: ClassVar[str] = "lower-linear"

    @property
    def span(self) -> Span:
        """A linear."""
        return LINEAR


def linear_problem(fused: FusedLinear, symbols: Mapping[str, SymbolRange]) -> LinearProblem:
    """Describe ``fused`` for the kernels, with the ranges of its dynamic sizes."""
    rows: int | torch.SymInt = 1
    for size in shape_of(fused.x)[:-1]:
        rows = rows * size
    n, k = (int(s) for s in shape_of(fused.weight))
    return LinearProblem(fused, fused.float_dtype, size_range(rows, symbols), n, k)
