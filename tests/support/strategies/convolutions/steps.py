"""The steps by which a random graph of convolutions grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.support.strategies.convolutions.between import between
from tests.support.strategies.convolutions.geometry import convolve, draw_geometry
from tests.support.strategies.convolutions.grower import ImageGrower
from tests.support.strategies.convolutions.qparams import image_qparams
from tests.support.strategies.convolutions.weights import Weights, draw_bias
from tests.support.strategies.convolutions.written import EXACT_WRITTEN, WRITTEN
from tests.support.strategies.grower import Value
from tests.support.strategies.linear_steps import ACTS, EXACT_ACTS
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops.views import shape_of

aten = torch.ops.aten


def grow(g: ImageGrower, weights: Weights) -> None:
    """Add one step."""
    step = g.pick(_STEPS)
    step(g, weights)


def block(g: ImageGrower, weights: Weights) -> None:
    """What networks are made of: quantize, convolve, what follows it, quantize."""
    x = g.image()
    if x is None:
        return
    if not _is_dequantized(x) and g.usual():
        x = quantized(g, x)
    _convolution(g, weights, x)
    for _ in range(g.pick([1, 0, 2])):
        g.pick(_EPILOGUE)(g, weights)
    if not g.chance(3):
        quantized(g, g.values[-1])


def _is_dequantized(x: Value) -> bool:
    return "dequantize" in str(x.node.target)


def quantized(g: ImageGrower, x: Value) -> Value:
    """Quantize and dequantize an image, perhaps for several users."""
    params = image_qparams(g, x.node)
    q = params.quantize(g, x.node)
    if g.chance(8):
        g.quantized_values.append(q)
    made = [g.add(params.dequantize(g, q), coarse=params.whole) for _ in range(g.pick([1, 1, 2]))]
    return made[-1]


def _convolution(g: ImageGrower, weights: Weights, x: Value) -> Value:
    if g.exact and not x.coarse:
        x = quantized(g, x)
    made = draw_geometry(g, x.node)
    real = g.real(x)
    weight = weights.draw(g, made, real)
    bias = draw_bias(g, made.out, real)
    node = convolve(g, x.node, weight, bias, made)
    if g.chance(8):
        # A sibling that differs by its weight alone.
        twin = weights.draw(g, made, real)
        g.add(convolve(g, x.node, twin, draw_bias(g, made.out, real), made))
    return g.add(node)


def _act(g: ImageGrower, _: Weights) -> None:
    x = g.image()
    if x is None:
        return
    if g.chance(5):
        g.pick(WRITTEN if not g.exact else EXACT_WRITTEN)(g, x)
        return
    op, args = g.pick(EXACT_ACTS if g.exact else ACTS)
    relu = op is aten.relu.default
    g.made(op, x.node, *args, coarse=x.coarse and relu)


def _sum(g: ImageGrower, _: Weights) -> None:
    """A residual sum, on either side, with or without a factor."""
    x = g.image()
    if x is None:
        return
    other = _residual(g, x)
    op = aten.add.Tensor if g.usual() else aten.sub.Tensor
    kwargs: dict[str, Any] = {}
    if g.chance(4):
        kwargs["alpha"] = g.pick([2, -0.5, 0] if g.exact else [2, -0.5, 0, 0.3])
    pair = (x.node, other) if g.draw_bool() else (other, x.node)
    y = g.made(op, *pair, **kwargs)
    if g.chance(6):
        # The same residual once more.
        g.made(aten.add.Tensor, y.node, other)


def _residual(g: ImageGrower, x: Value) -> Node:
    alike = g.alike(x.node)
    kind = g.pick(["value", "stored", "self", "input", "constant"])
    shape = g.shape(x.node)
    if kind == "stored":
        # Quantized as another tensor is, or as it enters the graph.
        source = g.pick(alike)
        params = image_qparams(g, source.node)
        if shape is not None and params.whole and g.chance(3):
            return params.dequantize(g, g.arg("q", params.stored, shape))
        return params.dequantize(g, params.quantize(g, source.node))
    if kind == "input" and shape is not None:
        return g.input(shape, g.pick([g.real(x), torch.float32])).node
    if kind == "self":
        return x.node
    if kind == "constant":
        return g.b.const(g.name("c"), g.numbers(_broadcast_shape(g, x), g.real(x)))
    return g.pick(alike).node


def _broadcast_shape(g: ImageGrower, x: Value) -> list[int]:
    """The shape of one number per channel, of one number, or of some of the axes."""
    sizes = [1] * len(shape_of(x.node))
    if g.usual():
        sizes[g.channel_axis] = g.channels(x.node)
    return sizes if g.draw_bool() else sizes[g.channel_axis :]


def _product(g: ImageGrower, weights: Weights) -> None:
    """Squeeze-excite, or a product with a constant of the channels or with another image."""
    x = g.image()
    if x is None:
        return
    kind = g.pick(["gate", "constant", "value"])
    if kind == "value":
        g.made(aten.mul.Tensor, x.node, g.pick(g.alike(x.node)).node)
        return
    other = g.b.const(g.name("c"), g.factors(_broadcast_shape(g, x), g.real(x)))
    if kind == "gate" and not g.exact:
        axes: list[Argument] = list(range(-g.rank, 0))
        pooled = g.made(aten.mean.dim, x.node, axes, True)
        inner = quantized(g, pooled) if g.draw_bool() else pooled
        gate = g.pick([aten.sigmoid.default, aten.hardsigmoid.default])
        wide = _convolution(g, weights, inner)
        if g.channels(wide.node) in {1, g.channels(x.node)} and max(g.spatial(wide.node)) == 1:
            other = g.b.call(gate, wide.node)
    pair = (x.node, other) if g.draw_bool() else (other, x.node)
    g.made(aten.mul.Tensor, *pair)


def _cast(g: ImageGrower, _: Weights) -> None:
    x = g.image()
    if x is not None:
        to = g.pick([torch.bfloat16, torch.float32])
        g.made(aten._to_copy.default, x.node, dtype=to)


def _quantize(g: ImageGrower, _: Weights) -> None:
    x = g.image()
    if x is not None:
        quantized(g, x)


def _between(g: ImageGrower, _: Weights) -> None:
    between(g)


_EPILOGUE: list[Callable[[ImageGrower, Weights], None]] = [_act, _sum, _act, _product, _cast]
_STEPS: list[Callable[[ImageGrower, Weights], None]] = [
    block,
    _between,
    block,
    _between,
    block,
    _between,
    _sum,
    _product,
    _quantize,
]
