"""Graphs that repeat a block, and their parts run one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tests.support.graphs.lowered import finish
from torch.fx import Node

from qfuse.backends.blocks.cut import CutProgram
from qfuse.backends.prepare import Program
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten

Layer = Callable[[GraphBuilder, Node, Node, int], Node]
"""Adds a layer to a stream, with a value from outside, and its number."""


def weights(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def residual_layer(b: GraphBuilder, x: Node, outside: Node, number: int) -> Node:
    """``x + linear(norm(x) * outside)``."""
    squares = b.call(aten.mean.dim, b.call(aten.mul.Tensor, x, x), [-1], keepdim=True)
    scale = b.call(aten.rsqrt.default, b.call(aten.add.Tensor, squares, 1e-6))
    scaled = b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, x, scale), outside)
    weight = b.const(f"weight_{number}", weights(number, 16, 16))
    return b.call(aten.add.Tensor, x, b.call(aten.linear.default, scaled, weight))


def gained_layer(gains: Sequence[float]) -> Layer:
    """``tanh(linear(x)) * gain``, where each layer has a scalar of its own."""

    def add(b: GraphBuilder, x: Node, outside: Node, number: int) -> Node:
        del outside
        weight = b.const(f"weight_{number}", weights(number, 16, 16))
        gain = b.const(f"gain_{number}", torch.tensor(gains[number]))
        y = b.call(aten.tanh.default, b.call(aten.linear.default, x, weight))
        return b.call(aten.mul.Tensor, y, gain)

    return add


def stacked(layers: int, layer: Layer = residual_layer, *, rows: int | str = "n") -> LoweredGraph:
    """Some layers on ``sin(x)``, with ``cos(angle)`` from outside, and a sum at the end."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, rows, 16)
    outside = b.call(aten.cos.default, b.arg("angle", torch.float32, 16))
    stream = b.call(aten.sin.default, x)
    for number in range(layers):
        stream = layer(b, stream, outside, number)
    return finish(b, [b.call(aten.sum.dim_IntList, stream, [-1])])


def bare(gains: Sequence[float] = (0.5, 1.5, 2.5, 3.5)) -> LoweredGraph:
    """Nothing but layers, each with a scalar of its own: one package."""
    b = GraphBuilder()
    stream = b.arg("x", torch.float32, "n", 16)
    for number, gain in enumerate(gains):
        weight = b.const(f"weight_{number}", weights(number, 16, 16))
        scalar = b.const(f"gain_{number}", torch.tensor(gain))
        stream = b.call(aten.mul.Tensor, b.call(aten.tanh.default, stream), scalar)
        stream = b.call(aten.linear.default, stream, weight)
    return finish(b, [stream])


def run_parts(
    parts: CutProgram, whole: Program, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run the parts of a program op by op."""
    wiring = parts.wiring
    values: dict[int, torch.Tensor] = dict(enumerate(inputs))
    values |= {number: whole.constants[name] for number, name in wiring.held.items()}
    for step in wiring.steps:
        module = parts.parts[step.part].module
        for own, name in step.constants.items():
            bound = torch.nn.Parameter(whole.constants[name], requires_grad=False)
            module.register_parameter(own, bound)
        made = module(*[values[number] for number in step.inputs])
        values |= dict(zip(step.outputs, made, strict=True))
    return [values[number] for number in wiring.results]
