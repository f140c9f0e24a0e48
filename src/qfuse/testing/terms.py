"""Arithmetic on the results of a quantized linear, written as in a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.ops import library as ops
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, stored_like

aten = torch.ops.aten


@dataclass(frozen=True)
class Term:
    """A node of a graph, with the arithmetic of a tensor."""

    b: GraphBuilder
    node: Node

    def call(self, op: OpOverload, *args: object) -> Term:
        """Call an op on it; operands may be terms."""
        plain = [a.node if isinstance(a, Term) else a for a in args]
        return Term(self.b, self.b.call(op, self.node, *plain))  # type: ignore[arg-type]

    def __add__(self, other: object) -> Term:
        return self.call(aten.add.Tensor, other)

    def __mul__(self, other: object) -> Term:
        return self.call(aten.mul.Tensor, other)

    def __truediv__(self, other: object) -> Term:
        return self.call(aten.div.Tensor, other)

    def __neg__(self) -> Term:
        return self.call(aten.neg.default)


def linear_result(b: GraphBuilder, dtype: torch.dtype = torch.float32) -> Term:
    """Add a weight-only linear of an input ``[n, 8]`` to 16 features."""
    spec = per_channel(float_dtype=dtype)
    scale = b.const("w_s", torch.rand(16, 1) * 0.01 + 1e-3)
    w = b.call(ops.dequantize, b.const("w", stored_like(spec, 16, 8)), scale, None, str(spec))
    return Term(b, b.call(aten.linear.default, b.arg("x", dtype, "n", 8), w))
