"""Batch norms that are left become a product and a sum, and nothing else does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph
from qfuse.lower import lower
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run

aten = torch.ops.aten
C = 5


def lowered(b: GraphBuilder, *results: Node) -> LoweredGraph:
    program = b.done(*results, stage=OptimizedGraph)
    return lower(program, Target.for_testing(), CostModel(CostProfile.pinned()), ())


def targets(low: LoweredGraph) -> list[object]:
    return [node.target for node in low.graph.nodes if node.op == "call_function"]


def parameters(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    weight, bias, mean = (torch.randn(C, dtype=dtype) for _ in range(3))
    return weight, bias, mean, torch.rand(C, dtype=dtype) + 0.1


def norm(b: GraphBuilder, x: Node, values: tuple[torch.Tensor | None, ...], eps: float) -> Node:
    names = ("weight", "bias", "mean", "var")
    nodes = [
        None if value is None else b.const(name, value)
        for name, value in zip(names, values, strict=True)
    ]
    call = b.call(aten._native_batch_norm_legit_no_training.default, x, *nodes, 0.1, eps)
    return b.item(call, 0)


@pytest.mark.parametrize("shape", [(3, C), (2, C, 7), (2, C, 4, 6), (1, C, 2, 3, 4), (0, C, 4, 4)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 0.25])
def test_a_norm_is_three_steps(shape: tuple[int, ...], affine: bool, eps: float) -> None:
    weight, bias, mean, var = parameters()
    given = (weight, bias, mean, var) if affine else (None, None, mean, var)
    b = GraphBuilder()
    low = lowered(b, norm(b, b.arg("x", torch.float32, *shape), given, eps))
    x = torch.randn(shape) * 10

    (y,) = run(low, [x])

    assert targets(low) == [aten.sub.Tensor, aten.mul.Tensor, aten.add.Tensor]
    doubles = [None if value is None else value.double() for value in given]
    exact = F.batch_norm(x.double(), doubles[2], doubles[3], doubles[0], doubles[1], eps=eps)
    # Two roundings of operands and two of steps, each of the size of the terms.
    factor = (weight if affine else torch.ones(C)).double() / (var.double() + eps).sqrt()
    spread = (C, *(1,) * (len(shape) - 2))
    terms = (x.double() * factor.reshape(spread)).abs() + (mean.double() * factor).abs().reshape(
        spread
    )
    terms = terms + (bias.double().abs().reshape(spread) if affine else 0)
    assert bool(((y.double() - exact).abs() <= 2 * torch.finfo(torch.float32).eps * terms).all())


def test_a_mean_that_is_large_beside_the_deviation_does_not_cancel() -> None:
    weight, bias, _, _ = parameters()
    mean, var = torch.full((C,), 100.0), torch.full((C,), 1e-4)
    b = GraphBuilder()
    low = lowered(b, norm(b, b.arg("x", torch.float32, 64, C), (weight, bias, mean, var), 0.0))
    x = mean + torch.randn(64, C) * 0.01

    (y,) = run(low, [x])

    exact = F.batch_norm(
        x.double(), mean.double(), var.double(), weight.double(), bias.double(), eps=0.0
    )
    assert (y - exact).abs().max() < 1e-5


def test_memory_formats_are_kept() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, C, 4, 6, order=(0, 2, 3, 1))
    low = lowered(b, norm(b, x, parameters(), 1e-5))
    image = torch.randn(2, C, 4, 6).contiguous(memory_format=torch.channels_last)

    (y,) = run(low, [image])

    assert aten.mul.Tensor in targets(low)
    assert y.stride() == image.stride()


def untouched(low: LoweredGraph) -> bool:
    return aten.mul.Tensor not in targets(low) and any("batch_norm" in str(t) for t in targets(low))


def test_a_norm_of_a_narrow_type_stays() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 2, C, 4)

    assert untouched(lowered(b, norm(b, x, parameters(torch.bfloat16), 1e-5)))


def test_factors_that_are_not_finite_stay() -> None:
    weight, bias, mean, var = parameters()
    for wrong in (torch.zeros(C), torch.full((C,), -1.0), torch.full((C,), float("nan"))):
        b = GraphBuilder()
        x = b.arg("x", torch.float32, 2, C, 4)

        assert untouched(lowered(b, norm(b, x, (weight, bias, mean, wrong), 0.0)))
    # Finite in float64 only.
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, C, 4)
    tiny = torch.full((C,), 1e-40)
    assert untouched(lowered(b, norm(b, x, (weight + 1e30, bias, mean, tiny), 0.0)))
    assert bool(var.isfinite().all())


def test_statistics_that_are_used_stay() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, C, 4)
    weight, bias, mean, var = (
        b.const(name, value) for name, value in zip("wbmv", parameters(), strict=True)
    )
    call = b.call(
        aten._native_batch_norm_legit_no_training.default, x, weight, bias, mean, var, 0.1, 1e-5
    )

    assert untouched(lowered(b, b.item(call, 0), b.item(call, 1)))


def test_statistics_of_the_call_stay() -> None:
    b = GraphBuilder()
    x, mean = b.arg("x", torch.float32, 2, C, 4), b.arg("mean", torch.float32, C)
    var = b.const("var", torch.ones(C))
    call = b.call(
        aten._native_batch_norm_legit_no_training.default, x, None, None, mean, var, 0.1, 1e-5
    )

    assert untouched(lowered(b, b.item(call, 0)))


def test_a_norm_in_training_stays() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, C, 4)
    mean, var = b.const("mean", torch.zeros(C)), b.const("var", torch.ones(C))
    result = b.call(aten.batch_norm.default, x, None, None, mean, var, True, 0.1, 1e-5, False)

    assert untouched(lowered(b, result))
