"""GoogLeNet with batch norms: blocks of four parallel branches that are joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from qfuse.zoo.convnets.blocks import (
    ConvNorm,
    PooledClassifier,
)
from qfuse.zoo.convnets.sizes import ScaledSizes, require_stages
from qfuse.zoo.convnets.trained_like import trained_like
from qfuse.zoo.images import image_family
from qfuse.zoo.weights import seeded

_STEM = (64, 64, 192)
# Channels of 1 x 1; of 1 x 1 before 3 x 3, and of that; of 1 x 1 before 5 x 5, and of that;
# of 1 x 1 after pooling.
_BLOCKS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


@dataclass(frozen=True, kw_only=True)
class InceptionSizes(ScaledSizes):
    """Sizes of a GoogLeNet.

    Attributes:
        depths: Blocks of each stage, of at most 2, 5 and 2.
    """

    depths: tuple[int, ...] = (2, 5, 2)

    def __post_init__(self) -> None:
        """Refuse too many stages."""
        super().__post_init__()
        require_stages(self.depths, len(_BLOCKS))


class _Branches(nn.Module):
    """Four branches of one input, joined along the channels."""

    def __init__(self, channels: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        one, before3, three, before5, five, pooled = sizes
        self.one = ConvNorm(channels, one)
        self.three = nn.Sequential(ConvNorm(channels, before3), ConvNorm(before3, three, 3))
        self.five = nn.Sequential(ConvNorm(channels, before5), ConvNorm(before5, five, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvNorm(channels, pooled))
        self.out = one + three + five + pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, out, height, width]."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


def _inception(sizes: InceptionSizes) -> nn.Module:
    scaled = sizes.scaled
    with seeded(sizes.seed):
        first, second, channels = map(scaled, _STEM)
        parts: list[nn.Module] = [
            ConvNorm(3, first, 7, 2),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            ConvNorm(first, second),
            ConvNorm(second, channels, 3),
        ]
        for blocks, depth in zip(_BLOCKS, sizes.depths, strict=False):
            parts.append(nn.MaxPool2d(3, 2, ceil_mode=True))
            for block in blocks[:depth]:
                branches = _Branches(channels, tuple(map(scaled, block)))
                parts.append(branches)
                channels = branches.out
        model = PooledClassifier(nn.Sequential(*parts), nn.Linear(channels, sizes.classes))
        return trained_like(model, sizes)


FAMILY = image_family(
    "GoogLeNet image classifier with parallel branches (random weights)",
    InceptionSizes,
    _inception,
)
