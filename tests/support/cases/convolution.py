"""Convolutions for tests of merging them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.support.cases.quantized_convolution import OPS
from tests.support.values import bits_same
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.cost import CostModel
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.stages.verify import verify
from qfuse.optimize.merge.merge_convolutions import MergeConvolutions
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.testing.build import GraphBuilder
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.quant import stored_like
from qfuse.testing.run import random_inputs

aten = torch.ops.aten
PADDED = {1: aten.conv1d.padding, 2: aten.conv2d.padding, 3: aten.conv3d.padding}


@dataclass(frozen=True)
class Conv:
    """A convolution with a weight of its own."""

    n: int
    spec: QuantSpec | None = None
    bias: bool = False
    zero: torch.dtype | None = None
    scale: torch.dtype = torch.float32
    float_dtype: torch.dtype = torch.float32
    kernel: tuple[int, ...] = (3, 2)
    settings: tuple[Argument, ...] = ()
    padding: str | None = None

    def node(self, b: GraphBuilder, x: Node, c: int, name: str) -> Node:
        """Add it."""
        shape = (self.n, c, *self.kernel)
        bias = (
            b.const(f"{name}_bias", torch.randn(self.n, dtype=self.float_dtype))
            if self.bias
            else None
        )
        weight = self.weight(b, shape, name)
        rank = len(self.kernel)
        if self.padding is not None:
            return b.call(PADDED[rank], x, weight, bias, (1,) * rank, self.padding, *self.settings)
        return b.call(OPS[rank], x, weight, bias, *self.settings)

    def weight(self, b: GraphBuilder, shape: tuple[int, ...], name: str) -> Node:
        """Add its weight."""
        spec = self.spec
        if spec is None:
            return b.const(name, torch.randn(shape, dtype=self.float_dtype))
        grid = [int(size) for size in spec.grid(shape)]
        scale = b.const(f"{name}_s", (torch.rand(grid) * 0.02 + 1e-3).to(self.scale))
        zero = None
        if self.zero is not None:
            zero = b.const(f"{name}_z", torch.randint(-5, 6, grid).to(self.zero))
        q = b.const(name, stored_like(spec, *shape))
        return b.call(ops.dequantize, q, scale, zero, str(spec))


def siblings(*convs: Conv, c: int = 4, lead: tuple[int | str, ...] = ("b",)) -> NormalGraph:
    """Convolutions of one input, each of which leaves the graph negated."""
    b = GraphBuilder()
    sizes = (7, 6, 5)[: len(convs[0].kernel)]
    x = b.arg("x", convs[0].float_dtype, *lead, c, *sizes)
    ys = [conv.node(b, x, c, f"w{i}") for i, conv in enumerate(convs)]
    return b.done(*(b.call(aten.neg.default, y) for y in ys))


def merge(program: NormalGraph, cost: CostModel | None = None, **sizes: int) -> PassResult:
    """Merge; every element must stay the same expression of the same values."""
    source = clone(program)
    result = MergeConvolutions().run(program, RewriteContext("optimize", cost))
    verify(program)
    inputs = random_inputs(program, **sizes)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))
    return result
