"""Synthetic graphs with long paths for quantization: movements, concatenations, several users.

They are normalized, as the phase that moves, combines and merges gets them. Every kind is written
by repeating one section, whose output is the next one's input, so a graph of any size is one that
a model could be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice

import torch
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor, per_token

_BATCH, _LENGTH, _HEADS, _WIDTH = 2, 8, 4, 32
_ROWS, _HEAD = _BATCH * _LENGTH, _WIDTH // _HEADS
_SHAPE = (_BATCH, _LENGTH, _WIDTH)
_SCALE, _ZERO = 0.0217, 7
_RUNGS = 6


def movement_graph(kind: str, calls: int) -> NormalGraph:
    """Build a graph of whole sections, with at least so many calls.

    Args:
        kind: Out of :data:`KINDS`.
        calls: Nodes that are calls; constants and parameters are not counted.
    """
    b = GraphBuilder()
    x = b.arg("x", torch.float32, *_SHAPE)
    section = KINDS[kind]
    count = 0
    while count < calls:
        w = _Writer(b, f"s{count}")
        x = section(w, x)
        count += w.calls
    return b.done(x)


def calls_in(program: NormalGraph) -> int:
    """Count the calls of a graph."""
    return sum(node.op == "call_function" for node in program.graph.nodes)


class _Writer:
    """Writes one section, and counts its calls; names of constants begin with the section's."""

    def __init__(self, b: GraphBuilder, name: str) -> None:
        self._before = len(b.graph.nodes)
        self.b = b
        self._name = name
        self._count = 0

    @property
    def calls(self) -> int:
        written = islice(reversed(self.b.graph.nodes), len(self.b.graph.nodes) - self._before)
        return sum(node.op == "call_function" for node in written)

    def name(self, hint: str) -> str:
        self._count += 1
        return f"{self._name}_{hint}{self._count}"

    def view(self, x: Node, *shape: int) -> Node:
        return self.b.call(aten.view.default, x, list(shape))

    def swap(self, x: Node, first: int, second: int) -> Node:
        return self.b.call(aten.transpose.int, x, first, second)

    def dense(self, x: Node) -> Node:
        return self.b.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def static(self, x: Node) -> Node:
        """Quantize and dequantize by one scale, each time by a constant of its own."""
        spec = per_tensor(len(shape_of(x)))
        grid = [1] * spec.rank
        scale = self.b.const(self.name("scale"), torch.full(grid, _SCALE))
        zero = self.b.const(self.name("zero"), torch.full(grid, _ZERO, dtype=torch.int32))
        q = self.b.call(ops.quantize, x, scale, zero, str(spec))
        return self.b.call(ops.dequantize, q, scale, zero, str(spec))

    def dynamic(self, x: Node) -> Node:
        """Quantize and dequantize by a scale per token."""
        spec = per_token(len(shape_of(x)))
        low, high = spec.quant_min, spec.quant_max
        choose = ChooseSpec(Formula.AO_SYMMETRIC, spec.dtype, low, high, spec.block, 1e-5)
        pair = self.b.call(ops.choose_qparams, x, str(choose))
        scale, zero = self.b.item(pair, 0), self.b.item(pair, 1)
        q = self.b.call(ops.quantize, x, scale, zero, str(spec))
        return self.b.call(ops.dequantize, q, scale, zero, str(spec))

    def linear(self, x: Node, n: int = _WIDTH) -> Node:
        weight = replace(per_channel(), quant_min=-127)
        k = int(shape_of(x)[-1])
        return QuantizedLinear(self.b, n, k, weight=weight).linear(x, self.name("w"))

    def heads(self, x: Node) -> Node:
        return self.swap(self.view(x, _BATCH, _LENGTH, _HEADS, _HEAD), 1, 2)

    def joined(self, x: Node) -> Node:
        return self.view(self.dense(self.swap(x, 1, 2)), *_SHAPE)


def _attention(w: _Writer, x: Node) -> Node:
    """Three linears with separate quantize ops of one value, with heads split and merged."""
    rows = w.view(x, _ROWS, _WIDTH)
    parts = [w.view(w.linear(w.static(rows)), *_SHAPE) for _ in range(3)]
    q, k, v = map(w.heads, parts)
    scores = w.b.call(aten.matmul.default, q, w.swap(k, 2, 3))
    mixed = w.b.call(aten.matmul.default, w.b.call(aten.softmax.int, scores, -1), v)
    out = w.linear(w.static(w.view(w.joined(mixed), _ROWS, _WIDTH)))
    return w.b.call(aten.add.Tensor, x, w.view(out, *_SHAPE))


def _tokens(w: _Writer, x: Node) -> Node:
    """A gated pair of linears and one behind it, each quantized per token behind a view."""
    rows = w.view(x, _ROWS, _WIDTH)
    gate, up = w.linear(w.dynamic(rows)), w.linear(w.dynamic(rows))
    inner = w.b.call(aten.mul.Tensor, w.b.call(aten.silu.default, gate), up)
    folded = w.view(w.view(inner, *_SHAPE), _ROWS, _WIDTH)
    return w.b.call(aten.add.Tensor, x, w.view(w.linear(w.dynamic(folded)), *_SHAPE))


def _joins(w: _Writer, x: Node) -> Node:
    """Parts that are quantized, moved and joined again, and padded."""
    pieces = w.b.call(aten.split_with_sizes.default, x, [_HEAD, _WIDTH - _HEAD], 2)
    left, right = w.static(w.b.item(pieces, 0)), w.static(w.b.item(pieces, 1))
    whole = w.static(w.b.call(aten.cat.default, [right, left], 2))
    wider = w.b.call(aten.constant_pad_nd.default, whole, [0, 4], 0.0)
    part = w.b.call(aten.slice.Tensor, w.static(wider), 2, 2, _WIDTH + 2)
    return w.b.call(aten.add.Tensor, x, w.linear(w.static(part)))


def _chains(w: _Writer, x: Node) -> Node:
    """Long paths between a dequantize and a quantize, with other users in between."""
    start = w.static(w.b.call(aten.relu.default, x))
    here = w.heads(start)
    aside = w.b.call(aten.sum.dim_IntList, here, [1])
    here = w.swap(w.swap(here, 2, 3), 1, 2)
    here = w.b.call(aten.unsqueeze.default, here, 0)
    here = w.b.call(aten.squeeze.dims, here, [0])
    here = w.swap(w.swap(here, 1, 2), 2, 3)
    here = w.static(w.joined(here))
    y = w.b.call(aten.add.Tensor, w.linear(here), w.linear(w.static(x)))
    flat = w.view(aside, _BATCH, 1, _ROWS * _HEAD // _BATCH)
    return w.b.call(aten.add.Tensor, y, w.b.call(aten.mean.dim, flat, [2], True))


def _ladder(w: _Writer, x: Node) -> Node:
    """A chain of movements, each used by its own quantize and by others."""
    here = w.b.call(aten.relu.default, x)
    sums = []
    for _ in range(_RUNGS):
        here = w.swap(here, 1, 2)
        stored = w.static(here)
        sums.append(w.b.call(aten.sum.dim_IntList, stored, [1, 2], True))
    for number in sums:
        x = w.b.call(aten.add.Tensor, x, number)
    return x


def _mixed(w: _Writer, x: Node) -> Node:
    for section in (_attention, _tokens, _joins, _chains, _ladder):
        x = section(w, x)
    return x


KINDS: Mapping[str, Callable[[_Writer, Node], Node]] = {
    "attention": _attention,
    "tokens": _tokens,
    "joins": _joins,
    "chains": _chains,
    "ladders": _ladder,
    "all of them": _mixed,
}
"""The sections by name."""
