"""Quantized building blocks for tests: specs, Q/DQ ops, and linears."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec, dtype_range
from qfuse.testing.build import GraphBuilder


def per_tensor(rank: int, dtype: torch.dtype = torch.int8, **changes: object) -> QuantSpec:
    """Return a spec with one scale."""
    return _spec((None,) * rank, dtype, changes)


def per_token(rank: int, dtype: torch.dtype = torch.int8, **changes: object) -> QuantSpec:
    """Return a spec with one scale per index of every axis but the last."""
    return _spec((*(1,) * (rank - 1), None), dtype, changes)


def per_channel(rank: int = 2, dtype: torch.dtype = torch.int8, **changes: object) -> QuantSpec:
    """Return a spec with one scale per index of the first axis."""
    return _spec((1, *(None,) * (rank - 1)), dtype, changes)


def _spec(
    block: tuple[int | None, ...], dtype: torch.dtype, changes: dict[str, object]
) -> QuantSpec:
    low, high = dtype_range(dtype)
    return replace(QuantSpec(dtype, low, high, block), **changes)  # type: ignore[arg-type]


def stored_like(
    spec: QuantSpec, *shape: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return random quantized values in the range of ``spec``."""
    # `randint` excludes its upper bound.
    low, high = spec.quant_min, spec.quant_max + 1
    return torch.randint(low, high, shape, generator=generator).to(spec.dtype)


@dataclass(slots=True)
class QuantizedLinear:
    """Adds ``linear(dequantize(quantize(x)), dequantize(w), b)`` to a builder.

    Attributes:
        b: The builder.
        n: Output features.
        k: Input features.
        bias: Whether there is a bias.
        weight: Spec of the weight.
    """

    b: GraphBuilder
    n: int
    k: int
    bias: bool = True
    weight: QuantSpec | None = None

    def weight_node(self, name: str = "w") -> Node:
        """Add the dequantized weight."""
        spec = self.weight or per_channel()
        q = self.b.const(name, stored_like(spec, self.n, self.k))
        scale = self.b.const(f"{name}_scale", torch.rand(spec.grid((self.n, self.k))) * 0.01 + 1e-3)
        return self.b.call(ops.dequantize, q, scale, None, str(spec))

    def quantized(self, x: Node, spec: QuantSpec, name: str = "x") -> Node:
        """Add a static quantize and dequantize of ``x``."""
        q, scale, zero = self.stored(x, spec, name)
        return self.b.call(ops.dequantize, q, scale, zero, str(spec))

    def stored(self, x: Node, spec: QuantSpec, name: str = "x") -> tuple[Node, Node, Node]:
        """Add a static quantize of ``x``; return it, the scale and the zero point."""
        grid = [1] * spec.rank
        scale = self.b.const(f"{name}_scale", torch.rand(grid) * 0.02 + 1e-2)
        middle = (spec.quant_min + spec.quant_max + 1) // 2
        # Off the middle, so that a rule that forgets the zero point changes values.
        zero = self.b.const(f"{name}_zero", torch.full(grid, middle + 3, dtype=torch.int32))
        return self.b.call(ops.quantize, x, scale, zero, str(spec)), scale, zero

    def linear(self, x: Node, name: str = "w") -> Node:
        """Add the linear on ``x`` without quantizing it."""
        weight = self.weight_node(name)
        if not self.bias:
            return self.b.call(torch.ops.aten.linear.default, x, weight)
        bias = self.b.const(f"{name}_bias", torch.randn(self.n))
        return self.b.call(torch.ops.aten.linear.default, x, weight, bias)
