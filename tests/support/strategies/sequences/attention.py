"""Products of two activations in random graphs: attention, and tensors with themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.support.strategies.grower import Value, hint
from tests.support.strategies.sequences.grower import MOST_AXES, SequenceGrower
from tests.support.strategies.sequences.products import product
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops.views import shape_of

aten = torch.ops.aten

Quantizer = Callable[[SequenceGrower, Value], Value]
_HEADS = 2


def attention(g: SequenceGrower, x: Value, quantized: Quantizer) -> Value | None:
    """Attention of a sequence with itself: products of two activations, or torch's fused op."""
    rank = g.rank(x)
    if not _is_small(g, x):
        return None
    size = g.pick([8, 4, 16])
    heads = rank == 3 and not g.chance(3)
    # Heads of queries that share keys and values.
    shared = heads and g.draw_bool()
    parts = [
        _part(g, x, size, _HEADS if heads else 0, quantized),
        *(_part(g, x, size, (1 if shared else _HEADS) * heads, quantized) for _ in range(2)),
    ]
    query, key, value = parts
    if {(g.rank(part), g.real(part)) for part in parts} != {(rank + heads, g.real(query))}:
        return None
    if g.chance(3):
        key = _cached(g, key)
    if shared:
        repeat = g.pick([_expanded, _interleaved])
        key, value = (repeat(g, part) for part in (key, value))
    if g.rank(query) == MOST_AXES and g.chance(3):
        op = aten.scaled_dot_product_attention.default
        causal, scale = g.draw_bool(), g.pick([None, 0.3])
        y = g.call(op, query.node, key.node, value.node, None, 0.0, causal, scale=scale)
    else:
        y = _two_products(g, query, key, value, size, quantized)
    if not heads:
        return g.add(y)
    together = g.call(aten.transpose.int, y, 1, 2)
    return g.made(aten.reshape.default, together, [*_lead(g, x), size])


def _part(g: SequenceGrower, x: Value, size: int, heads: int, quantized: Quantizer) -> Value:
    """Queries, keys or values of all features, or of each head."""
    part = product(g, x, size // _HEADS * heads if heads else size)
    if heads and g.rank(part) == g.rank(x):
        part = _split(g, part, heads)
    return part if g.chance(5) else quantized(g, part)


def grouped_scores(g: SequenceGrower, quantized: Quantizer) -> None:
    """Products of queries that are given with keys that several heads share."""
    batch, shared, size = g.pick([2, 1]), g.pick([2, 1, 3]), g.pick([8, 16, 5])
    lead = [batch, shared * _HEADS, g.pick([3, 1, 7]), size]
    query = quantized(g, g.add(g.arg("q", torch.float32, lead)))
    key = g.add(g.arg("k", torch.float32, [batch, shared, g.pick([5, 1, 4]), size]))
    first, repeat = g.draw_bool(), g.pick([_expanded, _interleaved])
    if g.chance(3):
        key = repeat(g, _cached(g, key))
    else:
        key = quantized(g, repeat(g, key)) if first else repeat(g, quantized(g, key))
    if g.rank(query) != MOST_AXES or g.rank(key) != MOST_AXES or g.real(query) != g.real(key):
        return
    if g.chance(3):
        query = Value(_scaled(g, query.node, size))
    y = g.made(aten.matmul.default, query.node, g.call(aten.transpose.int, key.node, -2, -1))
    if g.draw_bool():
        rows, columns = shape_of(y.node)[-2:]
        mask = g.arg("mask", torch.float32, [g.pick([1, batch]), 1, int(rows), int(columns)])
        g.made(aten.add.Tensor, y.node, mask)


def gram(g: SequenceGrower, x: Value, quantized: Quantizer) -> Value | None:
    """Multiply a sequence with itself."""
    if not _is_small(g, x):
        return None
    x = quantized(g, x)
    if g.rank(x) < 2:
        return None
    turned = g.call(aten.transpose.int, x.node, -2, -1)
    pair = [x.node, turned]
    return g.made(aten.matmul.default, *(pair if g.draw_bool() else pair[::-1]))


def _is_small(g: SequenceGrower, x: Value) -> bool:
    """Whether the scores of a sequence with itself are few."""
    return g.rank(x) >= 2 and g.elements(x.node) <= 1000 and hint(shape_of(x.node)[-2]) <= 64


def _lead(g: SequenceGrower, x: Value) -> list[Argument]:
    return [
        n if isinstance(n, int) else g.call(aten.sym_size.int, x.node, axis)
        for axis, n in enumerate(shape_of(x.node)[:-1])
    ]


def _split(g: SequenceGrower, x: Value, heads: int) -> Value:
    """Split the features into heads."""
    split = g.call(aten.view.default, x.node, [*_lead(g, x), heads, g.features(x) // heads])
    return g.made(aten.transpose.int, split, 1, 2)


def _expanded(g: SequenceGrower, x: Value) -> Value:
    """Repeat heads as ``repeat_kv`` does."""
    batch, heads, rows = _lead(g, x)
    assert isinstance(heads, int), "heads are known"
    single = g.call(aten.unsqueeze.default, x.node, 2)
    size = g.features(x)
    spread = g.call(aten.expand.default, single, [batch, heads, _HEADS, rows, size])
    copy = g.call(aten.clone.default, spread, memory_format=torch.contiguous_format)
    return g.made(aten._unsafe_view.default, copy, [batch, heads * _HEADS, rows, size])


def _interleaved(g: SequenceGrower, x: Value) -> Value:
    """Repeat heads with one op."""
    return g.made(aten.repeat_interleave.self_int, x.node, _HEADS, 1)


def _cached(g: SequenceGrower, like: Value) -> Value:
    """Stored values and their scale, both given at run time."""
    shape = g.shape(like.node)
    if shape is None:
        return like
    real = g.real(like)
    q = g.call(aten._to_copy.default, g.arg("cache", torch.int8, shape), dtype=real)
    one: list[int | str] = [1] * len(shape)
    none: list[int | str] = []
    grid = g.pick([one, [*shape[:-1], 1], none])
    return g.made(aten.mul.Tensor, q, g.arg("scales", real, grid))


def _scaled(g: SequenceGrower, x: Node, size: int) -> Node:
    """Multiply or divide by a constant."""
    op = g.pick([aten.mul.Tensor, aten.div.Tensor])
    number = size**-0.5 if op is aten.mul.Tensor else size**0.5
    return g.call(op, x, g.pick([number, 0.25, -1.5]))


def _scores(g: SequenceGrower, query: Value, key: Value) -> Node:
    if g.rank(query) == MOST_AXES and g.chance(4):
        return g.call(aten.einsum.default, "bhqd,bhkd->bhqk", [query.node, key.node])
    turned = g.call(aten.transpose.int, key.node, -2, -1)
    return g.call(aten.matmul.default, query.node, turned)


def _two_products(
    g: SequenceGrower, query: Value, key: Value, value: Value, size: int, quantized: Quantizer
) -> Node:
    where = g.pick(["scores", "query", "key", "both"])
    if where in {"query", "both"}:
        query = Value(_scaled(g, query.node, size))
    if where in {"key", "both"}:
        key = Value(_scaled(g, key.node, size))
    scores = _scores(g, query, key)
    if where == "scores":
        scores = _scaled(g, scores, size)
    weights = Value(g.call(aten.softmax.int, scores, -1))
    if g.draw_bool():
        weights = quantized(g, weights)
    if g.real(weights) != g.real(value):
        weights = Value(g.call(aten._to_copy.default, weights.node, dtype=g.real(value)))
    return g.call(aten.matmul.default, weights.node, value.node)
