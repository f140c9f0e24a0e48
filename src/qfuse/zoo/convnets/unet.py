"""U-Net: a class for every pixel, by transposed convolutions and joins with earlier results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from qfuse.ir.errors import OptionsError
from qfuse.zoo.convnets.blocks import ConvNorm
from qfuse.zoo.convnets.trained_like import trained_like
from qfuse.zoo.images import ImageSizes, image_family
from qfuse.zoo.weights import seeded


@dataclass(frozen=True, kw_only=True)
class UNetSizes(ImageSizes):
    """Sizes of a U-Net.

    Attributes:
        width: Channels at full resolution; every level below has twice as many.
        levels: How often the image is halved.
    """

    image: int = 256
    classes: int = 2
    width: int = 64
    levels: int = 4

    def __post_init__(self) -> None:
        """Refuse an image that cannot be halved as often."""
        super().__post_init__()
        # Halving an odd size rounds down, and doubling it again does not fit the earlier result.
        if self.image % 2**self.levels:
            raise OptionsError(
                f"image={self.image} cannot be halved {self.levels} times",
                fix=f"give a multiple of {2**self.levels}",
            )


class _Up(nn.Module):
    """Doubles height and width, joins the result with an earlier one, and convolves."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.up = nn.ConvTranspose2d(channels, half, 2, 2)
        self.convs = _double(channels, half)

    def forward(self, x: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        """Return [batch, channels / 2, 2 * height, 2 * width]."""
        joined: torch.Tensor = self.convs(torch.cat([earlier, self.up(x)], 1))
        return joined


class _UNet(nn.Module):
    def __init__(self, sizes: UNetSizes) -> None:
        super().__init__()
        widths = [sizes.width * 2**level for level in range(sizes.levels + 1)]
        self.first = _double(3, widths[0])
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(map(_double, widths[:-1], widths[1:]))
        self.up = nn.ModuleList(map(_Up, reversed(widths[1:])))
        self.last = nn.Conv2d(widths[0], sizes.classes, 1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, classes, height, width] for images [batch, 3, height, width]."""
        found = [self.first(pixel_values)]
        for down in self.down:
            found.append(down(self.pool(found[-1])))
        x = found.pop()
        for up in self.up:
            x = up(x, found.pop())
        logits: torch.Tensor = self.last(x)
        return logits


def _double(channels: int, out: int) -> nn.Module:
    return nn.Sequential(ConvNorm(channels, out, 3), ConvNorm(out, out, 3))


def _unet(sizes: UNetSizes) -> nn.Module:
    with seeded(sizes.seed):
        return trained_like(_UNet(sizes), sizes)


FAMILY = image_family(
    "U-Net image segmenter with transposed convolutions (random weights)", UNetSizes, _unet
)
