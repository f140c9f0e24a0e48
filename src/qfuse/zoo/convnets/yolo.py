"""A detector in the manner of YOLO: features of three resolutions, upsampled, joined, and read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from qfuse.ir.errors import OptionsError
from qfuse.zoo.convnets.blocks import ConvNorm
from qfuse.zoo.convnets.trained_like import trained_like
from qfuse.zoo.images import ImageSizes, image_family
from qfuse.zoo.weights import seeded

_BOX = 5  # four coordinates, and whether there is an object
_COARSEST = 32


@dataclass(frozen=True, kw_only=True)
class YoloSizes(ImageSizes):
    """Sizes of a detector.

    Attributes:
        width: Channels of the stem; every one of the four halvings after it doubles them.
        depth: Residual convolutions in each block of the backbone.
        anchors: Boxes at each position.
    """

    image: int = 640
    classes: int = 80
    width: int = 16
    depth: int = 1
    anchors: int = 3

    def __post_init__(self) -> None:
        """Refuse an image that cannot be halved five times."""
        super().__post_init__()
        if self.image % _COARSEST:
            raise OptionsError(
                f"image={self.image} cannot be halved five times",
                fix=f"give a multiple of {_COARSEST}",
            )


def _conv(channels: int, out: int, kernel: int = 1, stride: int = 1) -> nn.Module:
    return ConvNorm(channels, out, kernel, stride, act=nn.SiLU)


class _Bottleneck(nn.Module):
    """Two convolutions with a residual sum around them, or without."""

    def __init__(self, channels: int, *, residual: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(channels, channels), _conv(channels, channels, 3))
        self.residual = residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's shape."""
        y: torch.Tensor = self.body(x)
        return x + y if self.residual else y


class _Csp(nn.Module):
    """Two branches of half of the channels, of which one is deep, joined and mixed."""

    def __init__(self, channels: int, out: int, depth: int, *, residual: bool = True) -> None:
        super().__init__()
        half = out // 2
        self.short, self.enter = _conv(channels, half), _conv(channels, half)
        self.deep = nn.Sequential(*(_Bottleneck(half, residual=residual) for _ in range(depth)))
        self.mix = _conv(2 * half, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, out, height, width]."""
        mixed: torch.Tensor = self.mix(torch.cat([self.deep(self.enter(x)), self.short(x)], 1))
        return mixed


class _Pyramid(nn.Module):
    """Max pools over ever larger windows, joined: the field of view of the coarsest features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.enter, self.mix = _conv(channels, half), _conv(4 * half, channels)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's shape."""
        found = [self.enter(x)]
        for _ in range(3):
            found.append(self.pool(found[-1]))
        mixed: torch.Tensor = self.mix(torch.cat(found, 1))
        return mixed


class _Yolo(nn.Module):
    def __init__(self, sizes: YoloSizes) -> None:
        super().__init__()
        stem, w4, w8, w16, w32 = (sizes.width * 2**level for level in range(5))
        depth = sizes.depth
        self.to4 = nn.Sequential(_conv(3, stem, 3, 2), _conv(stem, w4, 3, 2), _Csp(w4, w4, depth))
        self.to8 = nn.Sequential(_conv(w4, w8, 3, 2), _Csp(w8, w8, depth))
        self.to16 = nn.Sequential(_conv(w8, w16, 3, 2), _Csp(w16, w16, depth))
        self.to32 = nn.Sequential(_conv(w16, w32, 3, 2), _Csp(w32, w32, depth), _Pyramid(w32))
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.narrow32, self.narrow16 = _conv(w32, w16), _conv(w16, w8)
        self.join16 = _Csp(2 * w16, w16, depth, residual=False)
        self.join8 = _Csp(2 * w8, w8, depth, residual=False)
        self.down8, self.down16 = _conv(w8, w8, 3, 2), _conv(w16, w16, 3, 2)
        self.rejoin16 = _Csp(2 * w8, w16, depth, residual=False)
        self.rejoin32 = _Csp(2 * w16, w32, depth, residual=False)
        boxes = sizes.anchors * (_BOX + sizes.classes)
        self.heads = nn.ModuleList(nn.Conv2d(width, boxes, 1) for width in (w8, w16, w32))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return [batch, anchors * (5 + classes), positions] for [batch, 3, height, width].

        The positions are those of strides 8, 16 and 32, in this order.
        """
        at8 = self.to8(self.to4(pixel_values))
        at16 = self.to16(at8)
        top32 = self.narrow32(self.to32(at16))
        top16 = self.narrow16(self.join16(torch.cat([self.up(top32), at16], 1)))
        fine8 = self.join8(torch.cat([self.up(top16), at8], 1))
        fine16 = self.rejoin16(torch.cat([self.down8(fine8), top16], 1))
        fine32 = self.rejoin32(torch.cat([self.down16(fine16), top32], 1))
        read = zip(self.heads, (fine8, fine16, fine32), strict=True)
        return torch.cat([head(fine).flatten(2) for head, fine in read], 2)


def _yolo(sizes: YoloSizes) -> nn.Module:
    with seeded(sizes.seed):
        return trained_like(_Yolo(sizes), sizes)


FAMILY = image_family(
    "YOLO-like detector with upsampling and joins (random weights)", YoloSizes, _yolo
)
