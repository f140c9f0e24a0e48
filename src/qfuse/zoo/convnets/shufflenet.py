"""ShuffleNetV2: half of the channels pass a block by, then the halves are shuffled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from qfuse.ir.errors import OptionsError
from qfuse.zoo.convnets.blocks import ConvNorm, PooledClassifier
from qfuse.zoo.convnets.sizes import require_stages
from qfuse.zoo.convnets.trained_like import trained_like
from qfuse.zoo.images import ImageSizes, image_family
from qfuse.zoo.weights import seeded

_STEM = 24
_STAGES = 3


@dataclass(frozen=True, kw_only=True)
class ShuffleNetSizes(ImageSizes):
    """Sizes of a ShuffleNetV2; the defaults are those of the 1x network.

    Attributes:
        width: Channels of the first stage, an even number; every further stage has twice as many.
        depths: Blocks of each stage.
        head: Channels before the classifier.
    """

    width: int = 116
    depths: tuple[int, ...] = (4, 8, 4)
    head: int = 1024

    def __post_init__(self) -> None:
        """Refuse an odd number of channels, and too many stages."""
        super().__post_init__()
        require_stages(self.depths, _STAGES)
        if self.width % 2:
            raise OptionsError(f"width={self.width} has no halves", fix="give an even number")


def shuffled(x: torch.Tensor) -> torch.Tensor:
    """Interleave the two halves of the channels of [batch, channels, height, width]."""
    batch, channels, height, width = x.shape
    halves = x.view(batch, 2, channels // 2, height, width)
    return halves.transpose(1, 2).reshape(batch, channels, height, width)


class _Unit(nn.Module):
    """One block; with a stride of 2 both halves see all channels, and are convolved."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        half = out // 2
        self.splits = stride == 1
        self.side = nn.Identity() if self.splits else _depthwise(channels, half, stride)
        body = [ConvNorm(half if self.splits else channels, half), _depthwise(half, half, stride)]
        self.body = nn.Sequential(*body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, out, height, width]; height and width are divided by the stride."""
        side, main = x.chunk(2, 1) if self.splits else (x, x)
        return shuffled(torch.cat([self.side(side), self.body(main)], 1))


def _depthwise(channels: int, out: int, stride: int) -> nn.Module:
    """A 3 x 3 convolution of each channel, without an activation, and a 1 x 1 convolution."""
    alone = ConvNorm(channels, channels, 3, stride, groups=channels, act=None)
    return nn.Sequential(alone, ConvNorm(channels, out))


def _shufflenet(sizes: ShuffleNetSizes) -> nn.Module:
    with seeded(sizes.seed):
        parts: list[nn.Module] = [ConvNorm(3, _STEM, 3, 2), nn.MaxPool2d(3, 2, 1)]
        channels = _STEM
        for stage, depth in enumerate(sizes.depths):
            out = sizes.width * 2**stage
            parts += [_Unit(channels, out, 2), *(_Unit(out, out, 1) for _ in range(depth - 1))]
            channels = out
        parts.append(ConvNorm(channels, sizes.head))
        model = PooledClassifier(nn.Sequential(*parts), nn.Linear(sizes.head, sizes.classes))
        return trained_like(model, sizes)


FAMILY = image_family(
    "ShuffleNetV2 image classifier with channel shuffles (random weights)",
    ShuffleNetSizes,
    _shufflenet,
)
