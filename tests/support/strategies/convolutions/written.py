"""Activations of random graphs as networks and exports write them, with slopes and in several ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.support.strategies.convolutions.grower import ImageGrower
from tests.support.strategies.grower import Value

from qfuse.ir.ops.views import shape_of

aten = torch.ops.aten


def _silu(g: ImageGrower, x: Value) -> None:
    g.made(aten.mul.Tensor, x.node, g.b.call(aten.sigmoid.default, x.node))


def _quick_gelu(g: ImageGrower, x: Value) -> None:
    gate = g.b.call(aten.sigmoid.default, g.b.call(aten.mul.Tensor, x.node, 1.702))
    pair = (x.node, gate) if g.draw_bool() else (gate, x.node)
    g.made(aten.mul.Tensor, *pair)


def _mish(g: ImageGrower, x: Value) -> None:
    soft = g.b.call(aten.softplus.default, x.node)
    g.made(aten.mul.Tensor, x.node, g.b.call(aten.tanh.default, soft))


def _hardswish(g: ImageGrower, x: Value) -> None:
    shifted = g.b.call(aten.add.Tensor, x.node, 3)
    share = g.b.call(aten.div.Tensor, g.b.call(aten.relu6.default, shifted), 6)
    g.made(aten.mul.Tensor, x.node, share)


def _elu(g: ImageGrower, x: Value) -> None:
    grown = g.b.call(aten.sub.Tensor, g.b.call(aten.exp.default, x.node), 1)
    below = g.b.call(aten.mul.Tensor, grown, 0.7)
    above = g.b.call(aten.gt.Scalar, x.node, 0)
    g.made(aten.where.self, above, x.node, below)


def _leaky_relu(g: ImageGrower, x: Value) -> None:
    below = g.b.call(aten.mul.Tensor, x.node, g.pick([0.25, -2.0]))
    above = g.b.call(g.pick([aten.gt.Scalar, aten.ge.Scalar]), x.node, 0)
    g.made(aten.where.self, above, x.node, below)


def _relu6(g: ImageGrower, x: Value) -> None:
    g.made(aten.clamp_max.default, g.b.call(aten.relu.default, x.node), 6)


def _prelu(g: ImageGrower, x: Value) -> None:
    """One slope, or one per index of axis 1, which torch takes for the channels."""
    count = shape_of(x.node)[1]
    several = isinstance(count, int) and g.draw_bool()
    shape = [int(count) if several else 1]
    if g.exact:
        slopes = torch.pow(2.0, -torch.randint(0, 3, shape, generator=g.random))
    else:
        slopes = g.numbers(shape)
    name, real = g.name("slope"), g.real(x)
    node = g.b.const(name, slopes.to(real)) if g.usual() else g.arg("slope", real, shape)
    g.made(aten.prelu.default, x.node, node)


EXACT_WRITTEN: list[Callable[[ImageGrower, Value], None]] = [_prelu, _leaky_relu, _relu6]
"""Those that are exact for numbers with few significant bits."""

WRITTEN: list[Callable[[ImageGrower, Value], None]] = [
    *EXACT_WRITTEN,
    _silu,
    _quick_gelu,
    _mish,
    _hardswish,
    _elu,
]
"""All of them."""
