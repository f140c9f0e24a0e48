"""Quantized linears and convolutions with a constant behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tests.support.sources.aten_spellings import assert_same_values
from torch.fx import Node

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.quant.spec import QuantSpec
from qfuse.rewrite.rule import Rule
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import stored_like
from qfuse.testing.run import random_inputs

aten = torch.ops.aten
N, C = 6, 4


@dataclass(frozen=True)
class Product:
    """A product of ``C`` and ``N`` channels.

    Attributes:
        kind: ``linear``, ``conv``, ``unbatched`` or ``transposed``.
        channels: Whether each output channel has a scale.
        zero: Whether there are zero points.
        bias: Whether there is a bias.
        groups: Groups of a convolution.
    """

    kind: str = "conv"
    channels: bool = True
    zero: bool = False
    bias: bool = True
    groups: int = 1

    @property
    def axis(self) -> int:
        """The axis of the output channels in the weight."""
        return int(self.kind == "transposed")

    @property
    def n(self) -> int:
        """The size of that axis."""
        return N // self.groups if self.kind == "transposed" else N

    def node(self, b: GraphBuilder, x: Node | None = None) -> Node:
        """Add it, of an input."""
        shape = {"linear": ("m", C), "unbatched": (C, 5, 7)}.get(self.kind, ("m", C, 5, 7))
        x = b.arg("x", torch.float32, *shape) if x is None else x
        weight = self.weight(b)
        bias = b.const("bias", torch.randn(N)) if self.bias else None
        if self.kind == "linear":
            return b.call(aten.linear.default, x, weight, bias)
        if self.kind == "transposed":
            op = aten.conv_transpose2d.input
            return b.call(op, x, weight, bias, [2, 1], [1, 0], [0, 0], self.groups)
        return b.call(aten.conv2d.default, x, weight, bias, [1, 2], [1, 0], [1, 1], self.groups)

    def weight(self, b: GraphBuilder) -> Node:
        """Add its dequantized weight."""
        if self.kind == "linear":
            shape: tuple[int, ...] = (N, C)
        elif self.kind == "transposed":
            shape = (C, N // self.groups, 3, 2)
        else:
            shape = (N, C // self.groups, 3, 2)
        block = [1 if self.channels and i == self.axis else None for i in range(len(shape))]
        spec = QuantSpec(torch.int8, -128, 127, tuple(block))
        grid = [int(size) for size in spec.grid(shape)]
        scale = b.const("w_s", torch.rand(grid) * 0.02 + 1e-3)
        zero = torch.randint(-9, 9, grid, dtype=torch.int32)
        point = b.const("w_z", zero) if self.zero else None
        return b.call(
            ops.dequantize, b.const("w", stored_like(spec, *shape)), scale, point, str(spec)
        )

    def wide(self, values: torch.Tensor) -> torch.Tensor:
        """Return values per output channel in the shape that broadcasts over the result."""
        return values if self.kind == "linear" else values.reshape(-1, 1, 1)


PRODUCTS = [
    Product("linear"),
    Product("linear", channels=False, zero=True),
    Product("conv", bias=False),
    Product("conv", channels=False, zero=True),
    Product("conv", groups=2, zero=True),
    Product("unbatched", channels=False),
    Product("transposed"),
    Product("transposed", channels=False, zero=True, bias=False),
]


def check_folded(program: NormalGraph, rule: Rule[Any]) -> Dequantize:
    """Apply ``rule``; only the product is left, with values and strides as before."""
    source = random_inputs(program, m=3)
    assert assert_same_values(program, source, rule).fired == {rule.name: 1}
    names = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert len(names) == 2
    (found,) = [view for n in program.graph.nodes if (view := as_dequantize(n)) is not None]
    return found
