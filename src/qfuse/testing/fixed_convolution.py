"""A convolution with sequential sums, see :mod:`qfuse.testing.fixed_order`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

# Computes ``x @ weight.T`` for one vector per window.
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """The settings of a convolution, one number per spatial axis.

    Attributes:
        stride: The distance of two windows.
        padding: The number of zeros before and after every axis.
        dilation: The distance of two elements of a window.
        groups: The number of channel groups.
        transposed: Whether it is a transposed convolution.
        output_padding: What a transposed convolution adds to the size of its result.
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


def sequential_convolution(
    x: torch.Tensor, weight: torch.Tensor, settings: WindowSettings, product: Product
) -> torch.Tensor:
    """Compute a convolution without a bias as products of its windows with the weight.

    Args:
        x: ``[batch, channels, *sizes]`` or ``[channels, *sizes]``.
        weight: The weight as the op takes it.
        settings: Its settings.
        product: Multiplies the windows ``[..., window]`` by a weight ``[channels, window]``.
    """
    if x.dim() < weight.dim():
        return sequential_convolution(x[None], weight, settings, product)[0]
    if settings.transposed:
        x, weight, settings = _direct(x, weight, settings)
    x = F.pad(x, [size for pair in reversed(settings.padding) for size in pair])
    parts = zip(x.chunk(settings.groups, 1), weight.chunk(settings.groups), strict=True)
    return torch.cat([_one_group(*part, settings, product) for part in parts], 1)


def _one_group(
    x: torch.Tensor, weight: torch.Tensor, settings: WindowSettings, product: Product
) -> torch.Tensor:
    sizes = zip(weight.shape[2:], settings.stride, settings.dilation, strict=True)
    for axis, (size, stride, dilation) in enumerate(sizes, 2):
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    rank = weight.dim() - 1
    # From [batch, channels, *sizes, *kernel] to [batch, *sizes, channels * kernel].
    windows = x.movedim(1, rank).flatten(rank)
    return product(windows, weight.flatten(1)).movedim(-1, 1).contiguous()


def _direct(
    x: torch.Tensor, weight: torch.Tensor, settings: WindowSettings
) -> tuple[torch.Tensor, torch.Tensor, WindowSettings]:
    """Return the convolution that computes a transposed one: zeros between the elements of x."""
    sizes = [(size - 1) * step + 1 for size, step in zip(x.shape[2:], settings.stride, strict=True)]
    spread = x.new_zeros((*x.shape[:2], *sizes))
    places = [slice(None), slice(None), *(slice(None, None, step) for step in settings.stride)]
    spread[tuple(places)] = x
    flipped = weight.flip(list(range(2, weight.dim())))
    turned = torch.cat([part.transpose(0, 1) for part in flipped.chunk(settings.groups)])
    kernel = zip(weight.shape[2:], settings.dilation, settings.padding, strict=True)
    whole = [(dilation * (size - 1), pair) for size, dilation, pair in kernel]
    late = zip(whole, settings.output_padding, strict=True)
    padding = tuple((w - pair[0], w - pair[1] + more) for (w, pair), more in late)
    ones = (1,) * len(settings.stride)
    return spread, turned, replace(settings, stride=ones, padding=padding, transposed=False)
