"""A fused linear to grow, shared by the tests of the rules that grow it."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss, Rule
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_tensor
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


def fuse(program: NormalGraph, rule: type[Rule[Any]]) -> PassResult:
    """Fuse the linear, then apply ``rule``; values must stay the same bits."""
    source = clone(program)
    apply_rules(program, [FuseLinear()])
    result = apply_rules(program, [rule()])
    for m in (1, 7):
        inputs = random_inputs(program, m=m)
        assert bits_same(run(program, inputs), run(source, inputs)), f"values changed at m={m}"
    return result


def only_miss(program: NormalGraph, rule: type[Rule[Any]]) -> Miss:
    """Apply ``rule``, which must refuse once and change nothing; return the refusal."""
    result = fuse(program, rule)
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    return miss


def calls(program: NormalGraph) -> list[str]:
    """Return the epilogue of every fused linear, and the name of every other call."""
    names = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            name = str(node.target).removesuffix(".default")
            names.append(f"linear[{node.args[12]}]" if name == "qfuse.linear" else name)
    return names
