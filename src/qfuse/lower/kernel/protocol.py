"""What a row of the kernel table is, and the problem that rows compete for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from qfuse.cost import size_range
from qfuse.cost.model import Plan
from qfuse.cost.sizes import SizeRange
from qfuse.ir.graph.stage_graph import SymbolRange, constant_of
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.views import shape_of
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets import Target


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a kernel does not take a problem."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """A fused linear as kernels see it: sizes, types, and the view of the node.

    Attributes:
        fused: The node, viewed.
        rows: Product of all axes of the activation but the last.
        n: Output features.
        k: Input features.
        real: Float type that the linear computes in and gives before its epilogue.
    """

    fused: FusedLinear
    rows: SizeRange
    n: int
    k: int
    real: torch.dtype

    @property
    def weight(self) -> torch.Tensor | None:
        """The stored weight."""
        return constant_of(self.fused.weight)


@dataclass(frozen=True, slots=True)
class Claim:
    """What part of a problem a kernel takes.

    Attributes:
        steps: How many epilogue steps, from the first; the rest is expanded behind the kernel.
        output: Whether it quantizes the output; only if it takes every step.
        work: What it costs, including what is left behind it.
        note: Anything worth telling a user.
    """

    steps: int
    output: bool
    work: Plan
    note: str = ""


class LinearKernel(Protocol):
    """One row of the table. ``supported`` is about the platform, ``accepts`` about the call."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    def supported(self, target: Target) -> Refusal | None:
        """Return why this platform cannot run it, or ``None``."""

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Return what it takes of ``problem``, or why it takes nothing."""

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> Node:
        """Add the call, packed constants included, and return its node."""


def problem_of(fused: FusedLinear, symbols: Mapping[str, SymbolRange]) -> LinearProblem:
    """Describe ``fused`` for the table, with the sizes that a call may bring."""
    rows: int | torch.SymInt = 1
    for size in shape_of(fused.x)[:-1]:
        rows = rows * size
    n, k = (int(s) for s in shape_of(fused.weight))
    return LinearProblem(fused, size_range(rows, symbols), n, k, fused.real)


def split_epilogue(problem: LinearProblem, claim: Claim) -> tuple[Epilogue, Epilogue]:
    """Split the epilogue into what the kernel takes and what is left."""
    steps = problem.fused.epilogue.steps
    return Epilogue(steps[: claim.steps]), Epilogue(steps[claim.steps :])
