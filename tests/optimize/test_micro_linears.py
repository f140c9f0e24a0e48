"""Linears whose weights and edges have scales in formats of their own, and of two levels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.cases.mx_linear import SPECS, dequantized, mx, nv, params
from tests.support.cases.propagate import Graph
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph, OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.linear import as_fused_linear, as_linear
from qfuse.ir.ops.qdq import as_dequantize, as_quantize
from qfuse.ir.quant.element import CONTAINER, Element
from qfuse.ir.quant.spec import Block, QuantSpec
from qfuse.ir.stages.verify import verify
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.fuse.output_quantize import FuseOutputQuantize
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss, Rule
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.run import random_inputs

aten = torch.ops.aten


def linears(
    g: Graph, x: Node, *weights: tuple[int, QuantSpec], k: int = 64, shared: bool = False
) -> NormalGraph:
    """Linears of one value, with stored weights."""
    outer = g.constant(torch.rand(1, 1), "outer") if shared else None
    ys = []
    for n, spec in weights:
        args = params(g, spec, n, k)
        args = args if outer is None else (*args[:3], outer)
        numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -3.0])
        q = numbers[torch.randint(0, 10, (n, k))].to(CONTAINER)
        weight = g.call(ops.dequantize, g.constant(q, "w"), *args)
        ys.append(g.call(aten.neg.default, g.call(aten.linear.default, x, weight)))
    return g.done(*ys)


def merged(program: NormalGraph) -> list[Any]:
    """Merge, compare by bits, and return the dequantizes of weights that are left."""
    source = clone(program)
    MergeLinears().run(program, RewriteContext("optimize"))
    verify(program)
    inputs = random_inputs(program)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))
    found = [v for n in program.graph.nodes if (v := as_linear(n)) is not None]
    return [as_dequantize(linear.weight) for linear in found]


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("weights", "block", "outer"),
    [
        ([(6, mx(1, 32)), (2, mx(1, 32)), (3, mx(1, 32))], (1, 32), None),
        ([(6, mx(1, 32)), (2, mx(1, 16))], (1, 16), None),
        ([(4, mx(2, 32)), (2, mx(2, 32))], (2, 32), None),
        ([(6, nv(1, 16)), (2, nv(1, 16))], (1, 16), (1, None)),
        ([(6, nv(1, 16, outer=(1, None))), (2, nv(1, 16))], (1, 16), (1, None)),
        ([(4, nv(1, 16, outer=(2, 32))), (2, nv(1, 8))], (1, 8), (1, 32)),
    ],
)
def test_weights_merge_and_second_levels_are_spread(
    weights: list[tuple[int, QuantSpec]], block: Block, outer: Block | None
) -> None:
    g = Graph(3, 64)
    (weight,) = merged(linears(g, g.x, *weights))
    assert weight.params.spec.block == block
    assert weight.params.spec.outer == outer


@pytest.mark.numeric
def test_one_second_level_stays_one() -> None:
    g = Graph(3, 64)
    (weight,) = merged(linears(g, g.x, (6, nv(1, 16)), (2, nv(1, 16)), shared=True))
    assert weight.params.spec.outer == (None, None)
    assert tuple(weight.params.outer_scale.meta["val"].shape) == (1, 1)


@pytest.mark.numeric
@pytest.mark.parametrize("other", [mx(1, 16), mx(1, 16, element=Element.WHOLE)])
def test_weights_in_other_formats_do_not_merge(other: QuantSpec) -> None:
    g = Graph(3, 64)
    assert len(merged(linears(g, g.x, (6, nv(1, 16)), (2, other)))) == 2
    g = Graph(3, 64)
    assert len(merged(linears(g, g.x, (6, mx(1, 16)), (2, mx(1, 16, element=Element.WHOLE))))) == 2


def fused(program: NormalGraph, *rules: type[Rule[Any]]) -> Counter[str]:
    """Apply rules that make fused ops; return what fired."""
    fired = apply_rules(program, [rule() for rule in rules], RewriteContext("optimize")).fired
    verify(OptimizedGraph(program.module, program.signature, program.log))
    return fired


@pytest.mark.numeric
@pytest.mark.parametrize("spec", SPECS, ids=["mx", "nvfp4"])
def test_linears_take_their_edges(spec: QuantSpec) -> None:
    g = Graph(3, 64)
    program = linears(g, dequantized(g, spec, 3, 64, real=g.x), (6, spec))
    source = clone(program)
    assert fused(program, FuseLinear) == {"fuse-linear": 1}
    (fused_linear,) = [v for n in program.graph.nodes if (v := as_fused_linear(n)) is not None]
    for edge in (fused_linear.x_params, fused_linear.weight_params):
        assert edge is not None
        assert (edge.outer_scale is None) == (spec.outer is None)
    inputs = random_inputs(program)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))


@pytest.mark.numeric
@pytest.mark.parametrize("spec", SPECS, ids=["mx", "nvfp4"])
def test_a_static_output_is_an_edge_too(spec: QuantSpec) -> None:
    g = Graph(3, 64)
    args = params(g, nv(1, 16), 64, 64)
    q = g.constant(torch.randint(-3, 4, (64, 64)).float().to(CONTAINER), "w")
    y = g.call(aten.linear.default, g.x, g.call(ops.dequantize, q, *args))
    out = params(g, spec, 3, 64)
    program = g.done(g.call(ops.dequantize, g.call(ops.quantize, y, *out), *out))
    source = clone(program)

    fired = fused(program, FuseLinear, FuseOutputQuantize)
    assert fired == {"fuse-linear": 1, "fuse-output-quantize": 1}
    inputs = random_inputs(program)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))


def test_an_output_with_a_second_level_from_run_time_is_none() -> None:
    g = Graph(3, 64)
    args = params(g, nv(1, 16), 64, 64)
    q = g.constant(torch.zeros(64, 64).to(CONTAINER), "w")
    y = g.call(aten.linear.default, g.x, g.call(ops.dequantize, q, *args))
    scale, _, text, _ = params(g, nv(1, 16), 3, 64)
    outer = g.b.arg("outer", torch.float32, 1, 1)
    program = g.done(g.call(ops.quantize, y, scale, None, text, outer))
    fused(program, FuseLinear)

    (node,) = [n for n in program.graph.nodes if as_quantize(n) is not None]
    miss = FuseOutputQuantize().match(node)
    assert isinstance(miss, Miss)
    assert (miss.code, miss.at) == (MissCode.NOT_CONSTANT, outer)
