"""Lowering hand-made graphs for a pinned machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Lowered
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.lower import lower
from qfuse.lower.kernels.registry import linear_kernels
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import stored_like
from qfuse.testing.run import random_inputs, run

NO_KERNELS = kernels.KernelLibrary(available=False, reason="switched off by the test")


def dequantized(
    b: GraphBuilder, shape: tuple[int, ...], spec: QuantSpec, *, zero_point: bool = False
) -> Node:
    """Add a random weight, with random zero points of quantized values or real offsets."""
    grid = spec.grid(shape)
    q = b.const("w", stored_like(spec, *shape))
    scale = b.const("w_scale", torch.rand(grid) * 0.01 + 1e-3)
    zero = None
    if zero_point and spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        zero = b.const("w_zero", torch.randn(grid) * 0.01)
    elif zero_point:
        zero = b.const("w_zero", stored_like(spec, *map(int, grid)).to(torch.int32))
    return b.call(ops.dequantize, q, scale, zero, str(spec))


def lowered(
    program: NormalGraph,
    library: kernels.KernelLibrary | None = None,
    target: Target | None = None,
) -> LoweredGraph:
    """Optimize and lower a copy of ``program`` for a pinned target and cost profile."""
    registry = linear_kernels(kernels.load() if library is None else library)
    cost = CostModel(CostProfile.pinned())
    return lower(optimize(clone(program)), target or Target.for_testing(), cost, registry)


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
