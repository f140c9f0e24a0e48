"""How a random graph quantizes and dequantizes images and weights, in two dialects."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from tests.support.strategies.convolutions.grower import ImageGrower
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain

# The ops of PT2E exist once this is imported.
importlib.import_module("torch.ao.quantization.fx._decomposed")
pt2e = torch.ops.quantized_decomposed

_RANGES = {
    torch.uint8: [(0, 255), (0, 255), (0, 127), (3, 200), (0, 15)],
    torch.int8: [(-128, 127), (-127, 127), (-128, 127), (-8, 7), (0, 127)],
}


@dataclass(frozen=True)
class Qparams:
    """Arguments of a quantize and of its dequantize.

    Attributes:
        up: The op that quantizes.
        down: The op that dequantizes.
        args: Their arguments after the tensor.
        stored: The dtype of the quantized values.
        bounds: Their range.
        whole: Whether there is one scale for the whole tensor.
        extra: Keyword arguments of the dequantize.
    """

    up: OpOverload
    down: OpOverload
    args: tuple[Argument, ...]
    stored: torch.dtype
    bounds: tuple[int, int]
    whole: bool
    extra: dict[str, Argument] = field(default_factory=dict)

    def quantize(self, g: ImageGrower, x: Node) -> Node:
        """Add a quantize."""
        return g.b.call(self.up, x, *self.args)

    def dequantize(self, g: ImageGrower, q: Node) -> Node:
        """Add a dequantize."""
        return g.b.call(self.down, q, *self.args, **self.extra)


def image_qparams(g: ImageGrower, x: Node) -> Qparams:
    """Draw parameters for an image: one scale most of the time, else one per channel or image."""
    axis = None
    if not g.exact and g.chance(6):
        known = [a for a, size in enumerate(shape_of(x)) if isinstance(size, int)]
        axis = g.pick([g.channel_axis, *known])
    return _draw(g, shape_of(x), axis, dtype_of(x), x=x)


def weight_qparams(
    g: ImageGrower, shape: Sequence[int], float_dtype: torch.dtype, *, transposed: bool
) -> Qparams:
    """Draw parameters for a weight: one scale, one per output channel, or along another axis."""
    right = 1 if transposed else 0
    axis: int | None = g.pick([right, right, None]) if g.usual() else None
    if not g.exact and g.chance(8):
        axis = g.pick([1 - right, *range(2, len(shape))])
    return _draw(g, shape, axis, float_dtype)


def _draw(
    g: ImageGrower,
    shape: Sequence[int | torch.SymInt],
    axis: int | None,
    float_dtype: torch.dtype,
    x: Node | None = None,
) -> Qparams:
    stored = g.pick([torch.uint8, torch.int8] if x is not None else [torch.int8, torch.uint8])
    bounds = g.pick(_RANGES[stored])
    if g.chance(3):
        return _in_qfuse(g, shape, axis, float_dtype, (stored, bounds))
    if axis is not None:
        count = int(shape[axis])
        scale = g.scale([count])
        zero = g.b.const(g.name("zero"), _zeros(g, [count], bounds))
        args: tuple[Argument, ...] = (scale, zero, axis, *bounds, stored)
        pair = pt2e.quantize_per_channel.default, pt2e.dequantize_per_channel.default
        return Qparams(*pair, args, stored, bounds, whole=False, extra=_extra(float_dtype))
    around_zero = bounds[0] <= 0 < bounds[1]
    if x is not None and around_zero and not g.exact and g.chance(5):
        eps = torch.finfo(torch.float32).eps
        both = g.b.call(pt2e.choose_qparams.tensor, x, *bounds, eps, stored)
        args = (g.b.item(both, 0), g.b.item(both, 1), *bounds, stored)
        pair = pt2e.quantize_per_tensor.tensor, pt2e.dequantize_per_tensor.tensor
        return Qparams(*pair, args, stored, bounds, whole=True, extra=_extra(float_dtype))
    number, offset = float(g.scales([1])), int(_zeros(g, [1], bounds))
    pair = pt2e.quantize_per_tensor.default, pt2e.dequantize_per_tensor.default
    args = (number, offset, *bounds, stored)
    return Qparams(*pair, args, stored, bounds, whole=True, extra=_extra(float_dtype))


def _zeros(g: ImageGrower, shape: Sequence[int], bounds: tuple[int, int]) -> torch.Tensor:
    """Zero points within the range; all zero once in a while."""
    zero = torch.randint(bounds[0], bounds[1] + 1, tuple(shape), generator=g.random)
    return zero.zero_() if g.chance(3) else zero


def _extra(float_dtype: torch.dtype) -> dict[str, Argument]:
    return {} if float_dtype is torch.float32 else {"out_dtype": float_dtype}


def _in_qfuse(
    g: ImageGrower,
    shape: Sequence[int | torch.SymInt],
    axis: int | None,
    float_dtype: torch.dtype,
    kind: tuple[torch.dtype, tuple[int, int]],
) -> Qparams:
    stored, bounds = kind
    block = tuple(1 if index == axis else None for index in range(len(shape)))
    arithmetic = Arithmetic(torch.float32, not g.chance(3), g.chance(3))
    domain = g.pick([ZeroPointDomain.INT, ZeroPointDomain.NONE])
    spec = QuantSpec(stored, *bounds, block, float_dtype, arithmetic, domain)
    if not g.usual():
        spec = replace(spec, arithmetic=replace(arithmetic, compute=torch.float64))
    grid = [int(size) for size in spec.grid(shape)]
    zero = None
    if domain is ZeroPointDomain.INT:
        zero = g.b.const(g.name("zero"), _zeros(g, grid, bounds))
    args = (g.scale(grid), zero, str(spec))
    return Qparams(ops.quantize, ops.dequantize, args, stored, bounds, whole=axis is None)
