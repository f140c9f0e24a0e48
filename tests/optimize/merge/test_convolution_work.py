from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.optimize.merge.merge_convolutions import MergeConvolutions
from qfuse.rewrite.context import RewriteContext
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor

aten = torch.ops.aten
SPEC = str(per_tensor(4))


def two_convolutions(*scales: float | None, channels: int = 64, size: int = 28) -> NormalGraph:
    """Two quantized convolutions of one image; each result is quantized with a scale, or float."""
    b = GraphBuilder()

    def scale(name: str, value: float) -> Node:
        return b.const(name, torch.full((1, 1, 1, 1), value))

    q = b.arg("q", torch.int8, 1, 32, size, size)
    x = b.call(ops.dequantize, q, scale("x_s", 0.1), None, SPEC)
    results = []
    for i, out in enumerate(scales):
        stored = torch.randint(-127, 128, (channels, 32, 1, 1), dtype=torch.int8)
        weight = b.const(f"w{i}", stored)
        real = b.call(ops.dequantize, weight, scale(f"w{i}_s", 0.01), None, SPEC)
        y = b.call(aten.relu.default, b.call(aten.conv2d.default, x, real, None))
        if out is not None:
            y = b.call(ops.quantize, y, scale(f"s{int(out * 100)}", out), None, SPEC)
        results.append(y)
    return b.done(*results)


def merges(program: NormalGraph) -> bool:
    """Whether the two become one at the prices of a pinned machine."""
    cost = CostModel(CostProfile.pinned())
    return MergeConvolutions().run(program, RewriteContext("optimize", cost)).modified


def test_results_that_are_quantized_alike_are_quantized_as_a_whole() -> None:
    assert merges(two_convolutions(0.5, 0.5, channels=8))


@pytest.mark.parametrize("size", [2, 28])
def test_results_that_are_quantized_differently_would_be_floats_in_between(size: int) -> None:
    assert not merges(two_convolutions(0.5, 0.25, size=size))
    assert not merges(two_convolutions(0.5, 0.25, 0.1, size=size))


@pytest.mark.parametrize("size", [2, 28])
def test_one_result_that_stays_float_does_not_make_the_other_float(size: int) -> None:
    assert not merges(two_convolutions(0.5, None, size=size))
