"""DenseNet: every layer sees the results of all layers before it, joined along the channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from qfuse.zoo.convnets.blocks import PooledClassifier
from qfuse.zoo.convnets.sizes import require_stages
from qfuse.zoo.convnets.trained_like import trained_like
from qfuse.zoo.images import ImageSizes, image_family
from qfuse.zoo.weights import seeded

_BOTTLENECK = 4
_STAGES = 4


@dataclass(frozen=True, kw_only=True)
class DenseNetSizes(ImageSizes):
    """Sizes of a DenseNet; the defaults are those of DenseNet-121.

    Attributes:
        growth: Channels that every layer adds; the stem has twice as many.
        depths: Layers of each dense block.
    """

    growth: int = 32
    depths: tuple[int, ...] = (6, 12, 24, 16)

    def __post_init__(self) -> None:
        """Refuse too many stages."""
        super().__post_init__()
        require_stages(self.depths, _STAGES)


class _Layer(nn.Sequential):
    """Norm, relu and 1 x 1 convolution; norm, relu and 3 x 3 convolution."""

    def __init__(self, channels: int, growth: int) -> None:
        wide = _BOTTLENECK * growth
        super().__init__(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, growth, 3, padding=1, bias=False),
        )


class _Block(nn.Module):
    """Layers, each of which sees everything before it."""

    def __init__(self, channels: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(channels + i * growth, growth) for i in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, channels + depth * growth, height, width]."""
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


def _transition(channels: int, out: int) -> nn.Module:
    convolution = nn.Conv2d(channels, out, 1, bias=False)
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), convolution, nn.AvgPool2d(2))


def _densenet(sizes: DenseNetSizes) -> nn.Module:
    with seeded(sizes.seed):
        channels = 2 * sizes.growth
        stem = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        norm = nn.BatchNorm2d(channels)
        parts: list[nn.Module] = [stem, norm, nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        for index, depth in enumerate(sizes.depths):
            if index:
                parts.append(_transition(channels, channels // 2))
                channels //= 2
            parts.append(_Block(channels, sizes.growth, depth))
            channels += depth * sizes.growth
        parts += [nn.BatchNorm2d(channels), nn.ReLU()]
        model = PooledClassifier(nn.Sequential(*parts), nn.Linear(channels, sizes.classes))
        return trained_like(model, sizes)


FAMILY = image_family(
    "DenseNet image classifier with joins of all earlier layers (random weights)",
    DenseNetSizes,
    _densenet,
)
