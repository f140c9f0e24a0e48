"""Quantized convolutions between other ops, for tests of memory layout."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.convolution import FusedConvolution
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.views import QuantParams
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor

SPEC = per_tensor(4)


@dataclass
class ConvolutionBoard:
    """A graph of an image of four channels."""

    b: GraphBuilder = field(default_factory=GraphBuilder)
    count: int = 0

    def image(self, *sizes: int | str, channels: int = 4) -> Node:
        """Add a float image as an input."""
        batch, *rest = sizes or ("n", 6, 6)
        return self.b.arg("x", torch.float32, batch, channels, *rest)

    def quantize(self, x: Node) -> Node:
        """Quantize with the scale of all activations."""
        return self.b.call(ops.quantize, x, self.scale(), None, str(SPEC))

    def dequantize(self, q: Node) -> Node:
        """Dequantize with the scale of all activations."""
        return self.b.call(ops.dequantize, q, self.scale(), None, str(SPEC))

    def scale(self) -> Node:
        """The scale of all activations."""
        return self.b.const("s", torch.full((1, 1, 1, 1), 0.05))

    def conv(
        self,
        q: Node,
        n: int = 8,
        *,
        kernel: int = 3,
        quantized: bool = True,
        zero: Node | None = None,
    ) -> Node:
        """Convolve with a weight of its own, and a padding that keeps the size."""
        self.count += 1
        name, pad = f"w{self.count}", kernel // 2
        shape = (n, q.meta["val"].shape[1], kernel, kernel)
        weight = self.b.const(name, torch.randint(-127, 128, shape, dtype=torch.int8))
        scale = self.b.const(f"{name}_s", torch.full((1, 1, 1, 1), 0.01))
        fused = FusedConvolution(
            q,
            q,
            QuantParams(SPEC, self.scale(), zero),
            weight,
            QuantParams(SPEC, scale, None),
            None,
            (1, 1),
            (pad, pad),
            (1, 1),
            False,
            (0, 0),
            1,
            QuantParams(SPEC, self.scale(), None) if quantized else None,
            Epilogue(),
            (),
        )
        return self.b.call(ops.convolution, *fused.call_args())

    def call(self, op: torch._ops.OpOverload, *args: Argument) -> Node:
        """Add another op."""
        return self.b.call(op, *args)

    def done(self, *results: Node) -> OptimizedGraph:
        """Return the graph."""
        return self.b.done(*results, stage=OptimizedGraph)
