"""All results of an op are replaced by those of its expansion, also those that are taken twice."""

from __future__ import annotations

import torch
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.lower import lower
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run

aten = torch.ops.aten
CHOICE = "ao-symmetric int8[-128,127] 1x* eps=1.1920928955078125e-07 float32 int8"


def lowered(b: GraphBuilder, *results: Node) -> LoweredGraph:
    program = b.done(*results, stage=OptimizedGraph)
    return lower(program, Target.for_testing(), CostModel(CostProfile.pinned()), ())


def test_a_result_that_is_taken_twice() -> None:
    # As rules leave it when one of two that combine equal ops may not fire.
    b = GraphBuilder()
    chosen = b.call(ops.choose_qparams, b.arg("x", torch.float32, 4, 8), CHOICE)
    one, other = b.item(chosen, 0), b.item(chosen, 0)
    low = lowered(b, b.call(aten.neg.default, one), b.call(aten.abs.default, other))

    x = torch.randn(4, 8)
    negative, positive = run(low, [x])

    scale, _ = ops.choose_qparams(x, CHOICE)
    assert torch.equal(negative, -scale)
    assert torch.equal(positive, scale)
