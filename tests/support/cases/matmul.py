"""Graphs of products of two quantized activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import QuantSpec
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_tensor, per_token

aten = torch.ops.aten

Shape = Sequence[int | str]


class Products:
    """A builder of products.

    Attributes:
        b: The builder.
        x: The left operand, dequantized.
        k: The right operand before its transpose, dequantized.
    """

    def __init__(
        self,
        x: Shape = (2, 3, "m", 8),
        k: Shape = (2, 3, 5, 8),
        specs: tuple[QuantSpec, QuantSpec] | None = None,
        *,
        float_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.b = GraphBuilder()
        self.block = QuantizedLinear(self.b, 1, 1)
        left, right = specs or (per_tensor(len(x), torch.uint8), per_tensor(len(k)))
        self.x = self.quantized(self.b.arg("x", float_dtype, *x), left, "x")
        self.k = self.quantized(self.b.arg("k", float_dtype, *k), right, "k")

    def quantized(self, value: Node, spec: QuantSpec, name: str) -> Node:
        """Add a quantize and dequantize: static if there is one scale, otherwise dynamic."""
        if all(block is None for block in spec.block):
            return self.block.quantized(value, spec, name)
        choose = ChooseSpec(
            Formula.AO_SYMMETRIC, spec.dtype, spec.quant_min, spec.quant_max, spec.block, 1e-7
        )
        scale = self.b.item(self.b.call(ops.choose_qparams, value, str(choose)), 0)
        q = self.b.call(ops.quantize, value, scale, None, str(spec))
        return self.b.call(ops.dequantize, q, scale, None, str(spec))

    @property
    def other(self) -> Node:
        """The right operand, ``[*batch, K, N]``."""
        return self.b.call(aten.transpose.int, self.k, -1, -2)

    def product(self) -> Node:
        """Add the product."""
        return self.b.call(aten.matmul.default, self.x, self.other)

    def done(self, *outs: Node) -> NormalGraph:
        """Finish the graph."""
        return self.b.done(*outs)


def rowwise(rank: int) -> tuple[QuantSpec, QuantSpec]:
    """Return specs with one scale per row of both operands before the transpose."""
    return per_token(rank), per_token(rank)
