"""Lower hand-built graphs for a pinned machine, and read which kernel was selected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Exactness, Lowered
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.kernels import KernelLibrary
from qfuse.lower import Wishes, lower
from qfuse.lower.floats.policy import QUANTIZED
from qfuse.lower.kernels.registry import all_kernels
from qfuse.lower.select.kernel import Kernel
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.targets import Target
from qfuse.testing.rules import truth
from qfuse.testing.run import random_inputs, run

NO_OWN_KERNELS = KernelLibrary(available=False, reason="switched off by the test")
"""In place of qfuse's compiled kernels, where only those of aten may be selected."""


def lowered_with(
    program: NormalGraph,
    *kernels: Kernel[Any],
    target: Target | None = None,
    library: KernelLibrary = NO_OWN_KERNELS,
) -> LoweredGraph:
    """Optimize and lower a copy of ``program`` with more kernels than those of the registry.

    Kernels compete with each other only, as with ``prefer="memory"``: products of a few elements
    are faster in float.

    Args:
        program: The graph.
        *kernels: New kernels.
        target: The machine; the default is ``Target.for_testing()``.
        library: qfuse's compiled kernels, by default none.
    """
    registry = (*all_kernels(library), *kernels)
    cost = CostModel(CostProfile.pinned())
    pinned = target or Target.for_testing()
    return lower(optimize(clone(program)), pinned, cost, registry, None, Wishes(floats=QUANTIZED))


def selected_kernel(program: LoweredGraph) -> str:
    """Return the kernel of the only quantized op, ``expand`` if it has none."""
    events = program.log.of(Lowered)
    assert len(events) == 1, f"{len(events)} ops were lowered, not one: {events}"
    return events[0].kernel


def refused_kernels(program: LoweredGraph) -> dict[str, str]:
    """Return why the other kernels were not selected for the only quantized op, by name."""
    events = program.log.of(Lowered)
    assert len(events) == 1, f"{len(events)} ops were lowered, not one: {events}"
    return dict(events[0].losers)


def check_lowered(
    program: NormalGraph,
    low: LoweredGraph,
    exactness: Exactness = Exactness.ROUNDING,
    **sizes: int,
) -> None:
    """Compare the values of a lowered graph with its source, on random inputs.

    Args:
        program: The source.
        low: What it was lowered to.
        exactness: How far values may differ: ``ROUNDING`` is within the source's own noise.
        **sizes: The symbolic sizes, by name.

    Raises:
        AssertionError: They differ by more; the message has the lowered graph.
    """
    inputs: Sequence[torch.Tensor] = random_inputs(program, **sizes)
    values = zip(run(low, inputs), run(program, inputs), truth(program, inputs), strict=True)
    for index, (new, old, meant) in enumerate(values):
        wrong = compare(new, old, meant, exactness, SITE).wrong
        assert wrong is None, f"output {index}: {wrong}\n{to_text(low.graph)}"
