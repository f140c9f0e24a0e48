"""The problem that rows for fused norms compete for; the table itself is that of all kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch.fx import Node

from qfuse.cost import size_range
from qfuse.ir.views import dtype_of, shape_of
from qfuse.lower.kernel import Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from qfuse.cost.model import Plan
    from qfuse.cost.sizes import SizeRange
    from qfuse.ir.fused_views import FusedNorm
    from qfuse.ir.program import SymbolRange

__all__ = ["NormClaim", "NormKernel", "NormProblem", "norm_problem_of"]


@dataclass(frozen=True, slots=True)
class NormProblem:
    """A fused norm as kernels see it: sizes, types, and the view of the node.

    Attributes:
        kind: What is lowered, in keys and rules of the report.
        fused: The node, viewed; its ``norm`` and ``output`` say all the rest.
        rows: Product of the axes that are not normalized over.
        n: Product of those that are.
        real: Float type of the input.
    """

    kind: ClassVar[str] = "norm"
    fused: FusedNorm
    rows: SizeRange
    n: SizeRange
    real: torch.dtype


@dataclass(frozen=True, slots=True)
class NormClaim:
    """That a kernel takes a problem, which it does as a whole.

    Attributes:
        work: What it costs.
        note: Anything worth telling a user.
    """

    work: Plan
    note: str = ""


class NormKernel(Row[NormProblem, NormClaim, tuple[Node, ...]], Protocol):
    """One row of the table of norms; it emits one node per result, in the order of the op."""


def norm_problem_of(fused: FusedNorm, symbols: Mapping[str, SymbolRange]) -> NormProblem:
    """Describe ``fused`` for the table, with the sizes that a call may bring."""
    shape, axes = shape_of(fused.x), fused.norm.axes
    rows, n = math.prod(shape[:-axes]), math.prod(shape[-axes:])
    return NormProblem(fused, size_range(rows, symbols), size_range(n, symbols), dtype_of(fused.x))
