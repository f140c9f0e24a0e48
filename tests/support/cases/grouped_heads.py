"""Products of grouped queries with keys or values whose heads are repeated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.support.cases.matmul import Products
from torch.fx import Node

from qfuse.ir.ops.views import shape_of
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten

Repeat = Callable[[GraphBuilder, Node, int], Node]


def _sizes(b: GraphBuilder, node: Node) -> list[int | Node]:
    """The sizes as arguments, read from the input that has them."""
    while node.op != "placeholder":
        node = node.all_input_nodes[0]
    ask = aten.sym_size.int
    shape = enumerate(shape_of(node))
    return [s if isinstance(s, int) else b.call(ask, node, axis) for axis, s in shape]


def expanded(b: GraphBuilder, node: Node, group: int) -> Node:
    """Spell the repetition of heads as ``repeat_kv`` does."""
    *batch, h, s, d = _sizes(b, node)
    assert isinstance(h, int), "heads are known"
    single = b.call(aten.unsqueeze.default, node, -3)
    spread = b.call(aten.expand.default, single, [*batch, h, group, s, d])
    copy = b.call(aten.clone.default, spread, memory_format=torch.contiguous_format)
    return b.call(aten._unsafe_view.default, copy, [*batch, h * group, s, d])


def reshaped(b: GraphBuilder, node: Node, group: int) -> Node:
    """Spell the repetition with a reshape, which copies."""
    *batch, h, s, d = _sizes(b, node)
    assert isinstance(h, int), "heads are known"
    single = b.call(aten.unsqueeze.default, node, -3)
    spread = b.call(aten.expand.default, single, [*batch, h, group, s, d])
    return b.call(aten.reshape.default, spread, [*batch, h * group, s, d])


def interleaved(b: GraphBuilder, node: Node, group: int) -> Node:
    """Repeat with one op."""
    return b.call(aten.repeat_interleave.self_int, node, group, len(shape_of(node)) - 3)


def flattened(b: GraphBuilder, node: Node, group: int) -> Node:
    """Merge batch and heads after they are repeated, as for ``bmm``."""
    bb, h, s, d = _sizes(b, node)
    assert isinstance(bb, int), "the batch is known"
    assert isinstance(h, int), "heads are known"
    whole = expanded(b, node, group)
    return b.call(aten.view.default, whole, [bb * h * group, s, d])


def before_transpose(b: GraphBuilder, node: Node, group: int) -> Node:
    """Repeat the heads of ``[batch, rows, heads, width]``, and transpose afterwards."""
    rows = b.call(aten.transpose.int, node, -3, -2)
    copies = b.call(aten.repeat_interleave.self_int, rows, group, len(shape_of(node)) - 2)
    return b.call(aten.transpose.int, copies, -3, -2)


def expanded_before_transpose(b: GraphBuilder, node: Node, group: int) -> Node:
    """The same as ``repeat_kv`` does."""
    *batch, h, s, d = _sizes(b, node)
    assert isinstance(h, int), "heads are known"
    rows = b.call(aten.transpose.int, node, -3, -2)
    single = b.call(aten.unsqueeze.default, rows, -2)
    spread = b.call(aten.expand.default, single, [*batch, s, h, group, d])
    copy = b.call(aten.clone.default, spread, memory_format=torch.contiguous_format)
    copies = b.call(aten._unsafe_view.default, copy, [*batch, s, h * group, d])
    return b.call(aten.transpose.int, copies, -3, -2)


REPEATS: dict[str, Repeat] = {
    "expand": expanded,
    "repeat_interleave": interleaved,
    "flattened": flattened,
    "before transpose": before_transpose,
    "expanded before transpose": expanded_before_transpose,
}


class Grouped(Products):
    """A product of grouped queries; ``x`` is the left and ``k`` the right one, not repeated."""

    def scores(self, repeat: Repeat, group: int) -> Node:
        """Multiply queries with repeated keys."""
        keys = repeat(self.b, self.k, group)
        turned = self.b.call(aten.transpose.int, keys, -1, -2)
        return self.b.call(aten.matmul.default, self.x, turned)

    def attended(self, repeat: Repeat, group: int) -> Node:
        """Multiply weights with repeated values."""
        return self.b.call(aten.matmul.default, self.x, repeat(self.b, self.k, group))
