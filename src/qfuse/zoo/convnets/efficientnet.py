"""EfficientNet-B0: inverted residual blocks with squeeze-excite and silu.

Not that of `transformers`: its convolutions are padded by name ("same"), which X86InductorQuantizer
does not take.
"""

from __future__ import annotations

from torch import nn

from qfuse.zoo.convnets.blocks import (
    ConvNorm,
    InvertedResidual,
    InvertedSizes,
    PooledClassifier,
)
from qfuse.zoo.convnets.sizes import InvertedResidualSizes
from qfuse.zoo.convnets.trained_like import trained_like
from qfuse.zoo.images import image_family
from qfuse.zoo.weights import seeded

_SQUEEZE = 4
_STEM, _HEAD = 32, 1280
# Expansion, kernel, channels, blocks, stride of the first one.
_STAGES = (
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 5, 40, 2, 2),
    (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)


def _efficientnet(sizes: InvertedResidualSizes) -> nn.Module:
    scaled = sizes.scaled
    with seeded(sizes.seed):
        channels = scaled(_STEM)
        parts: list[nn.Module] = [ConvNorm(3, channels, 3, 2, act=nn.SiLU)]
        for expansion, kernel, out, count, first in _STAGES:
            for index in range(min(count, sizes.depth)):
                stride = 1 if index else first
                squeezed = max(1, channels // _SQUEEZE)
                wide = channels * expansion
                block = InvertedSizes(channels, wide, scaled(out), kernel, stride, squeezed)
                parts.append(InvertedResidual(block, nn.SiLU, nn.SiLU, nn.Sigmoid))
                channels = block.out
        head = scaled(_HEAD)
        parts.append(ConvNorm(channels, head, act=nn.SiLU))
        model = PooledClassifier(nn.Sequential(*parts), nn.Linear(head, sizes.classes))
        return trained_like(model, sizes)


FAMILY = image_family(
    "EfficientNet-B0 image classifier with silu and squeeze-excite (random weights)",
    InvertedResidualSizes,
    _efficientnet,
)
