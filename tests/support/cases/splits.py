"""Splits, and what must not change when they sink, for the tests of what moves them."""

from __future__ import annotations

import torch
from tests.support.cases.propagate import Graph
from tests.support.sources.dialects import equal_but_for_nan, strides
from torch.fx import Node

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.stages.verify import verify
from qfuse.optimize.splits.sink_split import SinkSplit
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


def parts(g: Graph, *sizes: int, axis: int = -1) -> list[Node]:
    """The parts of the input along an axis."""
    split = g.call(aten.split_with_sizes.default, g.x, list(sizes), axis)
    return [g.b.item(split, index) for index in range(len(sizes))]


def sunk(
    program: NormalGraph, *, context: RewriteContext | None = None, **sizes: int
) -> PassResult:
    """Sink splits; bits, types and strides of all outputs must stay."""
    source = clone(program)
    result = apply_rules(program, [SinkSplit()], context)
    verify(program)
    inputs = random_inputs(program, **sizes)
    both = run_fixed_order(source, inputs), run_fixed_order(program, inputs)
    for old, new in zip(*both, strict=True):
        assert old.dtype == new.dtype
        assert old.shape == new.shape
        assert equal_but_for_nan(old, new), to_text(program.graph)
    both = run(source, inputs), run(program, inputs)
    assert [strides(old) for old in both[0]] == [strides(new) for new in both[1]]
    return result


def matmuls(g: Graph, *xs: Node) -> list[Node]:
    """A product of each, which reads it from memory."""
    made = []
    for x in xs:
        weight = g.constant(torch.randn(3, int(x.meta["val"].shape[-1])), "w")
        made.append(g.call(aten.linear.default, x, weight))
    return made
