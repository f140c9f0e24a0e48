"""The steps by which a random graph of sequences grows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.support.strategies.grower import Value
from tests.support.strategies.linear_steps import ACTS
from tests.support.strategies.movements import moved
from tests.support.strategies.sequences.activations import quantized
from tests.support.strategies.sequences.attention import attention, gram, grouped_scores
from tests.support.strategies.sequences.grower import SequenceGrower
from tests.support.strategies.sequences.products import product
from torch.fx.node import Argument

from qfuse.ir.ops.views import shape_of

aten = torch.ops.aten


def grow(g: SequenceGrower) -> None:
    """Add one step."""
    g.pick(_STEPS)(g)


def _wide(value: Value) -> bool:
    return len(shape_of(value.node)) >= 2


def block(g: SequenceGrower) -> None:
    """What networks are made of: quantize, multiply, what follows it, quantize."""
    x = g.sequence(_wide)
    if x is None:
        return
    if g.usual():
        x = quantized(g, x)
    if not g.is_sequence(x):
        return
    y = product(g, x)
    for _ in range(g.pick([0, 1, 2])):
        g.pick(_EPILOGUE)(g)
    if g.chance(3) and g.is_sequence(y):
        quantized(g, g.values[-1])


def _siblings(g: SequenceGrower) -> None:
    """Several products of one sequence, each with a quantize of its own or one for all."""
    x = g.sequence(_wide)
    if x is None:
        return
    shared = quantized(g, x) if g.draw_bool() else None
    made = []
    for _ in range(g.pick([2, 3])):
        source = shared or quantized(g, x)
        if g.is_sequence(source):
            made.append(product(g, source))
    if len(made) == 2 and g.draw_bool():
        _join(g, made)


def _join(g: SequenceGrower, parts: list[Value]) -> None:
    a, b = parts
    sizes = [list(map(str, g.sizes(part)))[:-1] for part in parts]
    if sizes[0] == sizes[1] and g.real(a) == g.real(b):
        g.made(aten.cat.default, [a.node, b.node], -1)


def _gated(g: SequenceGrower) -> None:
    """An MLP with a gate."""
    x = g.sequence(_wide)
    if x is None:
        return
    x = quantized(g, x)
    if not g.is_sequence(x):
        return
    n = g.pick([8, 16, 5])
    gate, up = product(g, x, n), product(g, x, n)
    if list(map(str, g.sizes(gate))) != list(map(str, g.sizes(up))):
        return
    act = g.pick([aten.silu.default, aten.gelu.default, aten.sigmoid.default, aten.relu.default])
    pair = [g.call(act, gate.node), up.node]
    y = g.made(aten.mul.Tensor, *(pair if g.draw_bool() else pair[::-1]))
    if g.draw_bool() and g.is_sequence(y):
        y = quantized(g, y)
        if g.is_sequence(y):
            product(g, y)


def _attention(g: SequenceGrower) -> None:
    x = g.sequence(_wide)
    if x is None:
        return
    if g.chance(4):
        gram(g, x, quantized)
    else:
        attention(g, quantized(g, x) if g.draw_bool() else x, quantized)


def _grouped(g: SequenceGrower) -> None:
    grouped_scores(g, quantized)


def _norm(g: SequenceGrower) -> None:
    x = g.sequence()
    if x is None:
        return
    size, real = g.features(x), g.real(x)
    kind = g.pick(["layer", "rms", "written"])
    if kind == "layer":
        pair: list[Argument] = [g.vector(size, real), g.vector(size, real)]
        args = pair if g.draw_bool() else [None, None]
        g.made(aten.layer_norm.default, x.node, [size], *args, 1e-5)
        return
    wide = (
        x.node
        if real is torch.float32
        else g.call(aten._to_copy.default, x.node, dtype=torch.float32)
    )
    squares = (
        g.call(aten.pow.Tensor_Scalar, wide, 2)
        if g.draw_bool()
        else g.call(aten.mul.Tensor, wide, wide)
    )
    mean = g.call(aten.mean.dim, squares, [-1], True)
    factor = g.call(aten.rsqrt.default, g.call(aten.add.Tensor, mean, 1e-6))
    y = g.call(aten.mul.Tensor, wide, factor)
    if real is not torch.float32:
        y = g.call(aten._to_copy.default, y, dtype=real)
    if kind == "written":
        y = g.call(aten.mul.Tensor, g.vector(size, real), y)
    g.add(y)


def _between(g: SequenceGrower) -> None:
    """A norm or a softmax between quantized values, as in static models."""
    x = g.sequence(_wide)
    if x is None:
        return
    x = quantized(g, x)
    if not g.is_sequence(x):
        return
    if g.draw_bool():
        size, real = g.features(x), g.real(x)
        y = g.made(aten.layer_norm.default, x.node, [size], g.vector(size, real), None, 1e-5)
    else:
        y = _masked_softmax(g, x)
    if g.is_sequence(y):
        quantized(g, y)


def _masked_softmax(g: SequenceGrower, x: Value) -> Value:
    size, real = g.features(x), g.real(x)
    kind, node = g.pick(["none", "added", "filled"]), x.node
    if kind == "added":
        node = g.call(aten.add.Tensor, node, g.vector(size, real))
    elif kind == "filled":
        bools = torch.rand(size, generator=g.random) > 0.6
        node = g.call(aten.masked_fill.Scalar, node, g.b.const(g.name("mask"), bools), -1e4)
    return g.made(aten.softmax.int, node, -1)


def _act(g: SequenceGrower) -> None:
    x = g.sequence()
    if x is None:
        return
    op, args = g.pick(ACTS)
    if g.chance(4):
        _written(g, x)
        return
    g.made(op, x.node, *args)


def _written(g: SequenceGrower, x: Value) -> None:
    """Activations in several ops."""
    kind = g.pick(["square", "quick", "swish", "tanh"])
    n = x.node
    if kind == "square":
        positive = g.call(aten.relu.default, n)
        if g.draw_bool():
            g.made(aten.pow.Tensor_Scalar, positive, 2)
        else:
            g.made(aten.mul.Tensor, positive, positive)
    elif kind == "quick":
        gate = g.call(aten.sigmoid.default, g.call(aten.mul.Tensor, n, 1.702))
        g.made(aten.mul.Tensor, n, gate)
    elif kind == "swish":
        g.made(aten.mul.Tensor, n, g.call(aten.sigmoid.default, n))
    else:
        cube = g.call(aten.pow.Tensor_Scalar, n, 3.0)
        inner = g.call(aten.add.Tensor, n, g.call(aten.mul.Tensor, cube, 0.044715))
        inner = g.call(aten.tanh.default, g.call(aten.mul.Tensor, inner, 0.7978845608028654))
        half = g.call(aten.mul.Tensor, n, 0.5)
        g.made(aten.mul.Tensor, half, g.call(aten.add.Tensor, inner, 1.0))


def _sum(g: SequenceGrower) -> None:
    """A residual sum, a product, or one with a constant."""
    x = g.sequence()
    if x is None:
        return
    other: Argument
    kind = g.pick(["value", "stored", "constant", "number", "input"])
    shape = g.shape(x.node)
    if kind == "constant":
        other = g.vector(g.features(x), g.real(x))
    elif kind == "number":
        other = g.pick([1.5, 2, -0.25])
    elif kind == "input" and shape is not None:
        other = g.arg("x", g.real(x), shape)
    elif kind == "stored":
        other = quantized(g, g.pick(g.alike(x))).node
    else:
        other = g.pick(g.alike(x)).node
    op = g.pick([aten.add.Tensor, aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor])
    factors: dict[str, Argument] = {}
    if op is not aten.mul.Tensor and g.chance(5):
        factors["alpha"] = g.pick([2, -0.5])
    pair = [x.node, other]
    if isinstance(other, torch.fx.Node) and g.draw_bool():
        pair.reverse()
    y = g.add(g.call(op, *pair, **factors))
    if g.chance(3) and g.is_sequence(y):
        quantized(g, y)


def _move(g: SequenceGrower) -> None:
    x = g.sequence()
    if x is None:
        return
    if g.draw_bool():
        x = quantized(g, x)
    node = moved(g, x.node)
    if node is not None:
        value = g.add(node)
        if g.draw_bool() and g.is_sequence(value):
            quantized(g, value)


def _chunk(g: SequenceGrower) -> None:
    """Split the features; a part may be unused."""
    x = g.sequence(lambda v: g.features(v) % 2 == 0)
    if x is None:
        return
    half = g.features(x) // 2
    parts = g.call(aten.split.Tensor, x.node, half, -1)
    items = [g.b.item(parts, index) for index in range(2)]
    if g.chance(3):
        items.pop()
    for item in items:
        g.add(item)


def _cat(g: SequenceGrower) -> None:
    x = g.sequence()
    if x is None:
        return
    other = g.pick(g.alike(x))
    if g.draw_bool():
        x, other = quantized(g, x), quantized(g, other)
    if g.real(x) != g.real(other) or str(g.sizes(x)) != str(g.sizes(other)):
        return
    y = g.made(aten.cat.default, [x.node, other.node], g.pick([-1, 0]))
    if g.draw_bool() and g.is_sequence(y):
        quantized(g, y)


def _pool(g: SequenceGrower) -> None:
    x = g.sequence(_wide)
    if x is None:
        return
    if g.draw_bool():
        x = quantized(g, x)
    op = g.pick([aten.mean.dim, aten.amax.default])
    g.made(op, x.node, [-2], g.draw_bool())


def _softmax(g: SequenceGrower) -> None:
    x = g.sequence()
    if x is not None:
        y = g.made(aten.softmax.int, x.node, -1)
        if g.draw_bool():
            quantized(g, y)


def _cast(g: SequenceGrower) -> None:
    x = g.sequence()
    if x is not None:
        dtype = g.pick([torch.bfloat16, torch.float32, torch.float16])
        g.made(aten._to_copy.default, x.node, dtype=dtype)


def _quantize(g: SequenceGrower) -> None:
    x = g.sequence()
    if x is not None:
        quantized(g, x)


_EPILOGUE: list[Callable[[SequenceGrower], None]] = [_act, _sum, _act, _norm, _cast]
_STEPS: list[Callable[[SequenceGrower], None]] = [
    block,
    _siblings,
    block,
    _gated,
    _attention,
    _grouped,
    block,
    _norm,
    _act,
    _sum,
    _move,
    _chunk,
    _cat,
    _pool,
    _softmax,
    _between,
    _quantize,
]
