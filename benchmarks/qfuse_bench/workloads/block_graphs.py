"""Quantized graphs of any number of linears, as quantization tools write them.

Blocks of six linears, as in a transformer: three read one input, one follows them, and two make an
MLP; with residual adds, norms and an activation between. Small weights: what is measured on these
graphs is the cost of the graph, not of its data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.testing.build import GraphBuilder
from qfuse_bench.harness._torch_api import register_decomposed

BLOCK = 6
"""Linears per block."""

_ATEN = torch.ops.aten
_WIDTH, _WIDE = 64, 128
_LOW, _HIGH = 0, 255


def blocks(linears: int, *, dynamic: bool = False) -> CapturedGraph:
    """Build a graph of whole blocks, with at least so many linears.

    Args:
        linears: How many.
        dynamic: Whether activations are quantized by scales that are chosen at run time, which
            takes more nodes.
    """
    register_decomposed()
    b = GraphBuilder()
    writer = _Writer(b, dynamic)
    x = b.arg("x", torch.float32, 4, 16, _WIDTH)
    for index in range(-(-linears // BLOCK)):
        x = _block(writer, x, f"b{index}")
    return b.done(x, stage=CapturedGraph)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes quantized linears as PT2E does."""

    b: GraphBuilder
    dynamic: bool

    def quantized(self, x: Node) -> tuple[Node, ...]:
        """Quantize an activation; return the operands of its dequantize."""
        ops = torch.ops.quantized_decomposed
        if not self.dynamic:
            params = (0.023, 117, _LOW, _HIGH, torch.uint8)
            q = self.b.call(ops.quantize_per_tensor.default, x, *params)
            return (q, *params)  # type: ignore[return-value]  # literals stand in for nodes
        eps = torch.finfo(torch.float32).eps
        chosen = self.b.call(ops.choose_qparams.tensor, x, _LOW, _HIGH, eps, torch.uint8)
        scale, zero = self.b.item(chosen, 0), self.b.item(chosen, 1)
        q = self.b.call(ops.quantize_per_tensor.tensor, x, scale, zero, _LOW, _HIGH, torch.uint8)
        return (q, scale, zero, _LOW, _HIGH, torch.uint8)  # type: ignore[return-value]

    def linear(self, stored: tuple[Node, ...], name: str, n: int, k: int) -> Node:
        """Add a linear on a quantized activation, with a dequantize of its own."""
        ops = torch.ops.quantized_decomposed
        overload = "tensor" if self.dynamic else "default"
        x = self.b.call(getattr(ops.dequantize_per_tensor, overload), *stored)
        weight = self.b.call(
            ops.dequantize_per_channel.default,
            self.b.const(f"{name}_q", torch.randint(-127, 128, (n, k), dtype=torch.int8)),
            self.b.const(f"{name}_scale", torch.rand(n) * 0.01 + 1e-3),
            self.b.const(f"{name}_zero", torch.zeros(n, dtype=torch.int64)),
            0,
            -127,
            127,
            torch.int8,
        )
        bias = self.b.const(f"{name}_bias", torch.randn(n))
        return self.b.call(_ATEN.linear.default, x, weight, bias)


def _block(writer: _Writer, x: Node, name: str) -> Node:
    b = writer.b
    stored = writer.quantized(_norm(b, x, f"{name}_norm1"))
    q, k, v = (writer.linear(stored, f"{name}_{part}", _WIDTH, _WIDTH) for part in "qkv")
    mixed = b.call(_ATEN.add.Tensor, b.call(_ATEN.mul.Tensor, q, k), v)
    out = writer.linear(writer.quantized(mixed), f"{name}_out", _WIDTH, _WIDTH)
    x = b.call(_ATEN.add.Tensor, out, x)
    up = writer.linear(writer.quantized(_norm(b, x, f"{name}_norm2")), f"{name}_up", _WIDE, _WIDTH)
    active = b.call(_ATEN.gelu.default, up)
    down = writer.linear(writer.quantized(active), f"{name}_down", _WIDTH, _WIDE)
    return b.call(_ATEN.add.Tensor, down, x)


def _norm(b: GraphBuilder, x: Node, name: str) -> Node:
    weight, bias = (
        b.const(f"{name}_w", torch.rand(_WIDTH)),
        b.const(f"{name}_b", torch.rand(_WIDTH)),
    )
    return b.call(_ATEN.layer_norm.default, x, [_WIDTH], weight, bias)
