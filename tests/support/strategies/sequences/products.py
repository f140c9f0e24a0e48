"""The products of random graphs: linears in every spelling."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.support.strategies.grower import Value
from tests.support.strategies.sequences.activations import row_scale
from tests.support.strategies.sequences.grower import SequenceGrower
from tests.support.strategies.sequences.weights import values, weight
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops.views import shape_of

aten = torch.ops.aten

# In bfloat16 torch's kernel reads beyond its operands where the features are no multiple of this.
_BLOCK = 16
_FEATURES = [8, 16, 4, 12, 5, 32, 33, 1]


def product(g: SequenceGrower, x: Value, n: int | None = None) -> Value:
    """Multiply a sequence with a weight in one of the spellings."""
    n = n or g.pick(_FEATURES)
    return g.pick(_PRODUCTS)(g, x, n)


def _bias(g: SequenceGrower, n: int, real: torch.dtype) -> list[Node]:
    return [g.vector(n, real, "bias")] if g.draw_bool() else []


def _linear(g: SequenceGrower, x: Value, n: int) -> Value:
    real = g.real(x)
    w = weight(g, n, g.features(x), real)
    return g.made(aten.linear.default, x.node, w, *_bias(g, n, real))


def _rows(g: SequenceGrower, x: Node) -> Node:
    """The sequence as a matrix."""
    return g.call(aten.reshape.default, x, [-1, shape_of(x)[-1]])


def _back(g: SequenceGrower, flat: Node, x: Value, n: int) -> Value:
    """A matrix of rows as a sequence again."""
    if g.rank(x) == 2 and g.draw_bool():
        return g.add(flat)
    lead: list[Argument] = [
        size if isinstance(size, int) else g.call(aten.sym_size.int, x.node, axis)
        for axis, size in enumerate(shape_of(x.node)[:-1])
    ]
    return g.made(aten.reshape.default, flat, [*lead, n])


def _mm(g: SequenceGrower, x: Value, n: int) -> Value:
    """``mm`` or ``addmm`` of the rows with a transposed weight."""
    real = g.real(x)
    w = weight(g, n, g.features(x), real)
    right = g.call(aten.t.default, w) if g.draw_bool() else g.call(aten.permute.default, w, [1, 0])
    left = _rows(g, x.node)
    if g.chance(3):
        return _back(g, g.call(aten.mm.default, left, right), x, n)
    factors: dict[str, Argument] = {}
    if g.chance(5):
        factors = {"beta": g.pick([1, 2, 0.5]), "alpha": g.pick([1, 0.5, -2])}
    bias = g.vector(n, real, "bias")
    return _back(g, g.call(aten.addmm.default, bias, left, right, **factors), x, n)


def _matmul(g: SequenceGrower, x: Value, n: int) -> Value:
    """``matmul`` with a weight that is stored transposed, or that a transpose turns."""
    real, k = g.real(x), g.features(x)
    if g.draw_bool():
        right = weight(g, k, n, real)
    else:
        right = g.call(aten.transpose.int, weight(g, n, k, real), 0, 1)
    y = g.made(aten.matmul.default, x.node, right)
    return g.made(aten.add.Tensor, y.node, g.vector(n, real)) if g.draw_bool() else y


def _scaled_after(g: SequenceGrower, x: Value, n: int) -> Value:
    """Weight-only, with the scale after the product."""
    real = g.real(x)
    w = g.call(aten._to_copy.default, values(g, n, g.features(x)), dtype=real)
    y = g.call(aten.linear.default, x.node, w)
    scale = g.scale(g.pick([(n,), (n,), (1, n), (1,)]), real)
    y = g.call(aten.mul.Tensor, y, scale)
    return g.made(aten.add.Tensor, y, g.vector(n, real)) if g.draw_bool() else g.add(y)


def _int_mm(g: SequenceGrower, x: Value, n: int) -> Value:
    """Rows quantized by hand, an integer product, and both scales."""
    real = g.real(x)
    if g.features(x) == 1:
        # Torch takes a transposed column for a column.
        return _scaled_after(g, x, n)
    rows = Value(_rows(g, x.node))
    scale = row_scale(g, rows)
    q = g.call(aten.round.default, g.call(aten.div.Tensor, rows.node, scale))
    q = g.call(aten.clamp.default, q, -128, 127)
    q = g.call(aten._to_copy.default, q, dtype=torch.int8)
    right = g.call(aten.t.default, values(g, n, g.features(x)))
    sums = g.call(aten._int_mm.default, q, right)
    sums = g.call(aten._to_copy.default, sums, dtype=g.pick([torch.float32, real]))
    w_scale = g.scale(g.pick([(n,), (1, n)]), g.pick([torch.float32, real]))
    factors = [scale, w_scale] if g.draw_bool() else [w_scale, scale]
    for factor in factors:
        sums = g.call(aten.mul.Tensor, sums, factor)
    if g.draw_bool():
        sums = g.call(aten.add.Tensor, sums, g.vector(n, real))
    if sums.meta["val"].dtype != real:
        sums = g.call(aten._to_copy.default, sums, dtype=real)
    return _back(g, sums, x, n)


def _int8pack(g: SequenceGrower, x: Value, n: int) -> Value:
    """ATen's weight-only product."""
    real = g.real(x)
    if real is torch.bfloat16 and g.features(x) % _BLOCK:
        return _scaled_after(g, x, n)
    rows = _rows(g, x.node)
    # Torch refuses other rows: "A must be contiguous on the last dimension". The fake kernels of
    # quantizes give contiguous results where the ops themselves do not.
    if x.node.op != "placeholder" or not rows.meta["val"].is_contiguous():
        rows = g.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
    args = (values(g, n, g.features(x)), g.scale((n,), real))
    y = g.call(aten._weight_int8pack_mm.default, rows, *args)
    return _back(g, y, x, n)


def _batched(g: SequenceGrower, x: Value, n: int) -> Value:
    """``bmm`` with one weight for each of the batch, or with a shared one."""
    sizes = shape_of(x.node)
    if g.rank(x) != 3 or not isinstance(sizes[0], int):
        return _matmul(g, x, n)
    real, k = g.real(x), g.features(x)
    if g.draw_bool():
        shared = g.call(aten.transpose.int, weight(g, n, k, real), 0, 1)
        right = g.call(aten.expand.default, shared, [sizes[0], k, n])
    else:
        w = g.call(aten._to_copy.default, values(g, int(sizes[0]), k, n), dtype=real)
        right = g.call(aten.mul.Tensor, w, g.scale((int(sizes[0]), 1, n), real))
    return g.made(aten.bmm.default, x.node, right)


_PRODUCTS: list[Callable[[SequenceGrower, Value, int], Value]] = [
    _linear,
    _linear,
    _mm,
    _linear,
    _matmul,
    _scaled_after,
    _int_mm,
    _int8pack,
    _batched,
]
