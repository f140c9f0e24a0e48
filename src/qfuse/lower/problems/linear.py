"""The problem that kernels see for a fused linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost import size_range
from qfuse.cost.sizes import SizeRange
from qfuse.ir.graph.stage_graph import SymbolRange, constant_of
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.views import shape_of
from qfuse.lower.problems.problem import Problem, Replaced
from qfuse.lower.select.kernel import LINEAR, Claim, Span
from qfuse.rewrite.prelude import Node


@dataclass(frozen=True, slots=True)
class LinearProblem(Problem):
    """A fused linear as kernels see it: sizes, dtypes, and the view of the node.

    Attributes:
        fused: The view of the node.
        rows: Product of all axes of the activation but the last.
        n: Output features.
        k: Input features.
        real: Float dtype of the linear's result before its epilogue.
    """

    fused: FusedLinear
    rows: SizeRange
    n: int
    k: int
    real: torch.dtype

    rule: ClassVar[str] = "lower-linear"

    @property
    def span(self) -> Span:
        """A linear."""
        return LINEAR

    @property
    def place(self) -> Node:
        """The linear."""
        return self.fused.node

    @property
    def anchor(self) -> Node:
        """The linear."""
        return self.fused.node

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """The linear."""
        return (Replaced(self.fused.node),)

    @property
    def weight(self) -> torch.Tensor | None:
        """The quantized weight."""
        return constant_of(self.fused.weight)


def linear_problem(fused: FusedLinear, symbols: Mapping[str, SymbolRange]) -> LinearProblem:
    """Describe ``fused`` for the kernels, with the ranges of its dynamic sizes."""
    rows: int | torch.SymInt = 1
    for size in shape_of(fused.x)[:-1]:
        rows = rows * size
    n, k = (int(s) for s in shape_of(fused.weight))
    return LinearProblem(fused, size_range(rows, symbols), n, k, fused.real)


def split_epilogue(problem: LinearProblem, claim: Claim) -> tuple[Epilogue, Epilogue]:
    """Split the epilogue into the part that the kernel covers and the rest."""
    steps = problem.fused.epilogue.steps
    return Epilogue(steps[: claim.steps]), Epilogue(steps[claim.steps :])
