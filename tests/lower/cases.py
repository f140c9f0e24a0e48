"""Lowering hand-made graphs for a pinned machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Lowered
from qfuse.lower import lower
from qfuse.lower.rows import kernel_rows
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.run import random_inputs, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from qfuse.ir.program import LoweredGraph, NormalGraph

__all__ = ["NO_KERNELS", "lowered", "pairs", "the_kernel", "why_not"]

NO_KERNELS = kernels.KernelLibrary(available=False, reason="switched off by the test")


def lowered(
    program: NormalGraph,
    library: kernels.KernelLibrary | None = None,
    target: Target | None = None,
) -> LoweredGraph:
    """Optimize and lower a copy of ``program`` for a pinned target and cost profile."""
    rows = kernel_rows(kernels.load() if library is None else library)
    cost = CostModel(CostProfile.pinned())
    return lower(optimize(clone(program)), target or Target.for_testing(), cost, rows)


def the_kernel(program: LoweredGraph) -> str:
    """Return the kernel of the only fused op."""
    (event,) = program.log.of(Lowered)
    return event.kernel


def why_not(program: LoweredGraph, kernel: str) -> str:
    """Return why ``kernel`` was not taken for the only fused op."""
    (event,) = program.log.of(Lowered)
    return dict(event.losers)[kernel]


def pairs(
    program: NormalGraph, low: LoweredGraph, **sizes: int
) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """Run both on the same fresh inputs; return (new, old) per output."""
    inputs = random_inputs(program, **sizes)
    return list(zip(run(low, inputs), run(program, inputs), strict=True))
