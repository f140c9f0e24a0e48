"""A fused product to grow, shared by the tests of the rules that grow it."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.cases.convolution import Conv
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.product import as_fused_product, kind_of
from qfuse.ir.sizes import same_strides
from qfuse.optimize.fuse.convolution import FuseConvolution
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.fuse.matmul import FuseMatmul
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss, Rule
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor
from qfuse.testing.run import random_inputs, run


class Case:
    """A builder with ``linear(dequantize(quantize(x)), dequantize(w), bias)`` of shape [m, 4]."""

    def __init__(self, rank: int = 2) -> None:
        self.b = GraphBuilder()
        self.block = QuantizedLinear(self.b, 4, 8)
        self.x = self.b.arg("x", torch.float32, *[2, 3][: rank - 2], "m", 8)
        self.residual = self.b.arg("r", torch.float32, *[2, 3][: rank - 2], "m", 4)
        self.y = self.block.linear(self.block.quantized(self.x, per_tensor(rank)))

    def done(self, *outs: Node) -> NormalGraph:
        """Finish the graph."""
        return self.b.done(*outs)


class ConvCase(Case):
    """A builder with ``conv2d(dequantize(quantize(x)), dequantize(w), bias)`` of [m, 4, 5, 4].

    Without a batch it is [4, 5, 4].
    """

    def __init__(self, *, batched: bool = True, channels_last: bool = False) -> None:
        self.b = GraphBuilder()
        self.block = QuantizedLinear(self.b, 4, 8)
        lead = ("m",) if batched else ()
        self.x = self.b.arg("x", torch.float32, *lead, 3, 6, 5)
        self.residual = self.b.arg("r", torch.float32, *lead, 4, 5, 4)
        x = self.last(self.x) if channels_last else self.x
        weight = Conv(4, per_channel(4), kernel=(2, 2)).weight(self.b, (4, 3, 2, 2), "w")
        bias = self.b.const("bias", torch.randn(4))
        real = self.block.quantized(x, per_tensor(4 if batched else 3))
        self.y = self.b.call(torch.ops.aten.conv2d.default, real, weight, bias)

    def last(self, x: Node) -> Node:
        """Add a copy of ``x`` that is channels-last."""
        last = torch.channels_last
        return self.b.call(torch.ops.aten.clone.default, x, memory_format=last)


class MatmulCase(Case):
    """A builder with ``mm(dequantize(quantize(x)), dequantize(k))`` of shape [m, 4]."""

    def __init__(self) -> None:
        self.b = GraphBuilder()
        self.block = QuantizedLinear(self.b, 4, 8)
        self.x = self.b.arg("x", torch.float32, "m", 8)
        self.residual = self.b.arg("r", torch.float32, "m", 4)
        k, scale = self.b.arg("k", torch.int8, 8, 4), self.b.const("ks", torch.full((1, 1), 0.03))
        right = self.b.call(ops.dequantize, k, scale, None, str(per_tensor(2)))
        left = self.block.quantized(self.x, per_tensor(2))
        self.y = self.b.call(torch.ops.aten.mm.default, left, right)


CASES = {"linear": Case, "convolution": ConvCase, "matmul": MatmulCase}


def fuse(program: NormalGraph, rule: type[Rule[Any]]) -> PassResult:
    """Fuse the product, then apply ``rule``; values and strides must stay the same."""
    source = clone(program)
    apply_rules(program, [FuseLinear(), FuseConvolution(), FuseMatmul()])
    result = apply_rules(program, [rule()])
    for m in (1, 7):
        inputs = random_inputs(program, m=m)
        got, want = run(program, inputs), run(source, inputs)
        assert bits_same(got, want), f"values changed at m={m}"
        assert all(map(same_strides, got, want)), f"strides changed at m={m}"
    return result


def only_miss(program: NormalGraph, rule: type[Rule[Any]]) -> Miss:
    """Apply ``rule``, which must refuse once and change nothing; return the refusal."""
    result = fuse(program, rule)
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    return miss


def calls(program: NormalGraph) -> list[str]:
    """Return the epilogue of every fused product, and the name of every other call."""
    names = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            name, fused = str(node.target).removesuffix(".default"), as_fused_product(node)
            names.append(name if fused is None else f"{kind_of(fused)}[{fused.epilogue}]")
    return names
