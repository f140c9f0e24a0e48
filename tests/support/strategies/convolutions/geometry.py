"""The settings of a random convolution, and the ways to write its call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from hypothesis import strategies as st
from tests.support.strategies.convolutions.grower import ImageGrower
from tests.support.strategies.grower import MOST_ELEMENTS
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

aten = torch.ops.aten

# 255 * 255 * 144 is below 2**24, so that every sum of such products is exact in float32.
MOST_PRODUCTS = 144

_PLAIN: dict[int, OpOverload] = {
    1: aten.conv1d.default,
    2: aten.conv2d.default,
    3: aten.conv3d.default,
}
_NAMED: dict[int, OpOverload] = {
    1: aten.conv1d.padding,
    2: aten.conv2d.padding,
    3: aten.conv3d.padding,
}
_TRANSPOSED: dict[int, OpOverload] = {
    1: aten.conv_transpose1d.default,
    2: aten.conv_transpose2d.input,
    3: aten.conv_transpose3d.input,
}


@dataclass(frozen=True)
class Geometry:
    """The settings of one convolution, one number for each spatial axis.

    Attributes:
        channels: Input channels.
        out: Output channels.
        kernel: Sizes of the kernel.
        stride: As in torch.
        padding: As in torch: numbers, "same" or "valid".
        dilation: As in torch.
        groups: As in torch.
        transposed: Whether it is a transposed one.
        output_padding: As in torch; zeros unless it is transposed.
    """

    channels: int
    out: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The sizes of the weight."""
        first, second = self.out, self.channels // self.groups
        if self.transposed:
            first, second = self.channels, self.out // self.groups
        return (first, second, *self.kernel)

    @property
    def products(self) -> int:
        """The greatest number of products in one sum."""
        return self.channels // self.groups * prod(self.kernel)

    def sizes(self, spatial: Sequence[int]) -> list[int]:
        """The spatial sizes of the result."""
        return [self._size(axis, size) for axis, size in enumerate(spatial)]

    def _size(self, axis: int, size: int) -> int:
        extent = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        if self.padding == "same":
            return size
        each = 0 if isinstance(self.padding, str) else self.padding[axis]
        if self.transposed:
            return (size - 1) * self.stride[axis] - 2 * each + extent + self.output_padding[axis]
        inside = size + 2 * each - extent
        return inside // self.stride[axis] + 1 if inside >= 0 else 0

    def fits(self, spatial: Sequence[int], images: int) -> bool:
        """Whether the result has elements, and not too many.

        Args:
            spatial: Spatial sizes of the input.
            images: How many there are.
        """
        sizes = self.sizes(spatial)
        return min(sizes) > 0 and images * self.out * prod(sizes) <= MOST_ELEMENTS


def draw_geometry(g: ImageGrower, x: Node) -> Geometry:
    """Draw settings for a convolution of `x`: simpler ones if they do not fit its sizes."""
    channels = g.channels(x)
    transposed = g.chance(5)
    groups = _groups(g, channels)
    out = groups * g.pick([1, 2] if groups > 1 else [4, 8, 3, 1, 5, 17])
    kernel = _each(g, [3, 1, 2, 5])
    stride = _each(g, [1, 2, 3])
    dilation = _each(g, [1, 1, 2])
    padding: tuple[int, ...] | str = _each(g, [1, 0, 2])
    if not transposed and g.chance(5):
        padding = g.pick(["same", "valid"])
        stride = (1,) * g.rank if padding == "same" else stride
    made = Geometry(channels, out, kernel, stride, padding, dilation, groups, transposed)
    most = [max(s, d) for s, d in zip(stride, dilation, strict=True)]
    extra = tuple(g.draw(st.integers(0, m - 1)) if transposed else 0 for m in most)
    made = replace(made, output_padding=extra)
    if g.exact and made.products > MOST_PRODUCTS:
        made = replace(made, kernel=(1,) * g.rank)
    spatial, images = g.spatial(x), g.elements(x) // channels // prod(g.spatial(x))
    ones, zeros = (1,) * g.rank, (0,) * g.rank
    tamer = replace(made, stride=ones, output_padding=zeros)
    least = replace(tamer, out=groups, kernel=ones, padding=zeros, dilation=ones)
    return next((m for m in (made, tamer) if m.fits(spatial, images)), least)


def _groups(g: ImageGrower, channels: int) -> int:
    if not g.chance(3):
        return 1
    halves = [2] if channels % 2 == 0 else []
    return g.pick([channels, *halves])


def _each(g: ImageGrower, options: list[int]) -> tuple[int, ...]:
    """One number for each axis, all equal most of the time."""
    first = g.pick(options)
    if not g.chance(4):
        return (first,) * g.rank
    return tuple(g.pick(options) for _ in range(g.rank))


def convolve(g: ImageGrower, x: Node, weight: Node, bias: Node | None, made: Geometry) -> Node:
    """Add the call, in any of the ways to write it."""
    named = isinstance(made.padding, str)
    if named:
        args: list[Argument] = [made.stride, made.padding, made.dilation, made.groups]
        return _shortened(g, _NAMED[g.rank], [x, weight, bias], args, [(1,), "valid", (1,), 1])
    if g.batched and g.chance(4):
        args = [made.stride, made.padding, made.dilation, made.transposed]
        call = [x, weight, bias, *args, made.output_padding, made.groups]
        return g.b.call(aten.convolution.default, *map(_listed, call))
    if made.transposed:
        args = [made.stride, made.padding, made.output_padding, made.groups, made.dilation]
        defaults: list[Argument] = [(1,), (0,), (0,), 1, (1,)]
        return _shortened(g, _TRANSPOSED[g.rank], [x, weight, bias], args, defaults)
    args = [made.stride, made.padding, made.dilation, made.groups]
    return _shortened(g, _PLAIN[g.rank], [x, weight, bias], args, [(1,), (0,), (1,), 1])


def _shortened(
    g: ImageGrower,
    op: OpOverload,
    operands: list[Argument],
    args: list[Argument],
    defaults: list[Argument],
) -> Node:
    """Add a call; equal numbers may be written once, and what is the default may be left out."""
    if g.chance(3):
        args = [_once(value) for value in args]
    if g.draw(st.booleans()):
        while args and _once(args[-1]) == _once(defaults[len(args) - 1]):
            args.pop()
        if not args and operands[-1] is None:
            operands = operands[:-1]
    return g.b.call(op, *operands, *map(_listed, args))


def _once(value: Argument) -> Argument:
    if isinstance(value, tuple) and value and all(number == value[0] for number in value):
        return (value[0],)
    return value


def _listed(value: Argument) -> Argument:
    """As captured graphs write it."""
    return list(value) if isinstance(value, tuple) else value
