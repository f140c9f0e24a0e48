"""What stands between the convolutions of random graphs: pools, paddings, joins and movements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.support.strategies.convolutions.grower import ImageGrower
from tests.support.strategies.grower import MOST_ELEMENTS, Value
from torch._ops import OpOverload
from torch.fx.node import Argument

from qfuse.ir.ops.views import dtype_of, shape_of

aten = torch.ops.aten

_MAX: dict[int, OpOverload] = {
    1: aten.max_pool1d.default,
    2: aten.max_pool2d.default,
    3: aten.max_pool3d.default,
}
_AVG: dict[int, OpOverload] = {
    1: aten.avg_pool1d.default,
    2: aten.avg_pool2d.default,
    3: aten.avg_pool3d.default,
}
_ADAPTIVE_AVG: dict[int, OpOverload] = {
    1: aten.adaptive_avg_pool1d.default,
    2: aten.adaptive_avg_pool2d.default,
    3: aten.adaptive_avg_pool3d.default,
}
_NEAREST: dict[int, OpOverload] = {
    1: aten.upsample_nearest1d.vec,
    2: aten.upsample_nearest2d.vec,
    3: aten.upsample_nearest3d.vec,
}
_LINEAR: dict[int, OpOverload] = {
    1: aten.upsample_linear1d.vec,
    2: aten.upsample_bilinear2d.vec,
    3: aten.upsample_trilinear3d.vec,
}
_REFLECT: dict[int, OpOverload] = {
    1: aten.reflection_pad1d.default,
    2: aten.reflection_pad2d.default,
    3: aten.reflection_pad3d.default,
}


def between(g: ImageGrower) -> None:
    """Add one of them, if the sizes of the newest image allow what is drawn."""
    x = g.image()
    if x is not None:
        g.pick(_STEPS)(g, x)


def _max_pool(g: ImageGrower, x: Value) -> None:
    size, padding = g.pick([(2, 0), (3, 1), (3, 0)])
    spatial = g.spatial(x.node)
    if min(spatial) + 2 * padding < size:
        return
    if g.rank == 1 and not isinstance(shape_of(x.node)[-1], int):
        return  # Its operator reads the size as a number.
    stride = g.pick([2, 1])
    if g.rank == 2 and g.chance(3):
        both = aten.max_pool2d_with_indices.default
        pair = g.b.call(both, x.node, [size] * 2, [stride] * 2, [padding] * 2)
        g.add(g.b.item(pair, 0), coarse=x.coarse)
        return
    args: list[Argument] = [[size] * g.rank, [stride] * g.rank, [padding] * g.rank]
    g.made(_MAX[g.rank], x.node, *args, coarse=x.coarse)


def _avg_pool(g: ImageGrower, x: Value) -> None:
    if (g.exact and not x.coarse) or min(g.spatial(x.node)) < 2:
        return
    # torch has no 3-d average pool of half types.
    if _AVG[g.rank] is aten.avg_pool3d.default and dtype_of(x.node) is not torch.float32:
        return
    args: list[Argument] = [[2] * g.rank, [2] * g.rank]
    if g.chance(3):
        args += [[1] * g.rank, g.draw_bool(), g.draw_bool()]
    g.made(_AVG[g.rank], x.node, *args)


def _adaptive_pool(g: ImageGrower, x: Value) -> None:
    if g.exact and not x.coarse:
        return
    if g.chance(3):
        axes: list[Argument] = list(range(-g.rank, 0))
        g.made(aten.mean.dim, x.node, axes, True)
        return
    g.made(_ADAPTIVE_AVG[g.rank], x.node, [g.pick([1, 2])] * g.rank)


def _upsample(g: ImageGrower, x: Value) -> None:
    if not g.batched or g.elements(x.node) * 2**g.rank > MOST_ELEMENTS:
        return
    if not g.exact and g.chance(4):
        g.made(_LINEAR[g.rank], x.node, None, g.draw_bool(), [2.0] * g.rank)
        return
    g.made(_NEAREST[g.rank], x.node, None, [2.0] * g.rank, coarse=x.coarse)


def _pad(g: ImageGrower, x: Value) -> None:
    amounts: list[Argument] = [g.pick([1, 0, 2]) for _ in range(2 * g.rank)]
    if g.chance(4) and min(g.spatial(x.node)) > 2:
        g.made(_REFLECT[g.rank], x.node, amounts, coarse=x.coarse)
        return
    value = g.pick([0.0, 0.0, 0.5, -1.0])
    g.made(aten.constant_pad_nd.default, x.node, amounts, value, coarse=x.coarse)


def _cat(g: ImageGrower, x: Value) -> None:
    others = g.alike(x.node, channels=False)
    parts = [x, *(g.pick(others) for _ in range(g.pick([1, 2])))]
    if len({g.real(part) for part in parts}) > 1 and g.usual():
        return
    if sum(g.elements(part.node) for part in parts) > MOST_ELEMENTS:
        return
    g.made(aten.cat.default, [part.node for part in parts], g.channel_axis)


def _shuffle(g: ImageGrower, x: Value) -> None:
    channels = g.channels(x.node)
    if channels % 2:
        return
    sizes = list(shape_of(x.node))
    axis = g.channel_axis
    known: list[Argument] = [
        size if isinstance(size, int) else g.b.call(aten.sym_size.int, x.node, index)
        for index, size in enumerate(sizes)
    ]
    split = [*known[:axis], 2, channels // 2, *known[axis + 1 :]]
    halves = g.b.call(aten.reshape.default, x.node, split)
    turned = g.b.call(aten.transpose.int, halves, axis, axis + 1)
    g.made(aten.reshape.default, turned, known, coarse=x.coarse)


def _half(g: ImageGrower, x: Value) -> None:
    """One or both halves of the channels."""
    channels, axis = g.channels(x.node), g.channel_axis
    if channels < 2:
        return
    half = channels // 2
    for start, end in [(0, half), (half, channels)][: g.pick([1, 2])]:
        g.made(aten.slice.Tensor, x.node, axis, start, end, coarse=x.coarse)


def _channels_last(g: ImageGrower, x: Value) -> None:
    """Another memory format, or back."""
    if not g.batched or g.rank == 1:
        g.made(aten.clone.default, x.node, memory_format=torch.contiguous_format, coarse=x.coarse)
        return
    last = torch.channels_last if g.rank == 2 else torch.channels_last_3d
    form = g.pick([last, torch.contiguous_format])
    g.made(aten.clone.default, x.node, memory_format=form, coarse=x.coarse)


_STEPS: list[Callable[[ImageGrower, Value], None]] = [
    _max_pool,
    _avg_pool,
    _adaptive_pool,
    _upsample,
    _pad,
    _cat,
    _shuffle,
    _half,
    _channels_last,
]
