"""MobileNetV3-Large: inverted residual blocks with squeeze-excite and hardswish."""

from __future__ import annotations

from torch import nn

from qfuse.zoo.convnets.blocks import (
    Activation,
    ConvNorm,
    InvertedResidual,
    InvertedSizes,
    PooledClassifier,
)
from qfuse.zoo.convnets.sizes import InvertedResidualSizes, multiple_of_8
from qfuse.zoo.convnets.trained_like import trained_like
from qfuse.zoo.images import image_family
from qfuse.zoo.weights import seeded

_SQUEEZE, _WIDEN = 4, 6
_STEM, _HEAD = 16, 1280
# Stages of blocks: kernel, expanded channels, channels, squeeze-excite, activation, stride.
_STAGES: tuple[tuple[tuple[int, int, int, bool, Activation, int], ...], ...] = (
    ((3, 16, 16, False, nn.ReLU, 1),),
    ((3, 64, 24, False, nn.ReLU, 2), (3, 72, 24, False, nn.ReLU, 1)),
    (
        (5, 72, 40, True, nn.ReLU, 2),
        (5, 120, 40, True, nn.ReLU, 1),
        (5, 120, 40, True, nn.ReLU, 1),
    ),
    (
        (3, 240, 80, False, nn.Hardswish, 2),
        (3, 200, 80, False, nn.Hardswish, 1),
        (3, 184, 80, False, nn.Hardswish, 1),
        (3, 184, 80, False, nn.Hardswish, 1),
    ),
    ((3, 480, 112, True, nn.Hardswish, 1), (3, 672, 112, True, nn.Hardswish, 1)),
    (
        (5, 672, 160, True, nn.Hardswish, 2),
        (5, 960, 160, True, nn.Hardswish, 1),
        (5, 960, 160, True, nn.Hardswish, 1),
    ),
)


def _mobilenet(sizes: InvertedResidualSizes) -> nn.Module:
    scaled = sizes.scaled
    with seeded(sizes.seed):
        channels = scaled(_STEM)
        parts: list[nn.Module] = [ConvNorm(3, channels, 3, 2, act=nn.Hardswish)]
        for kernel, expanded, out, squeezes, act, stride in (
            block for stage in _STAGES for block in stage[: sizes.depth]
        ):
            wide = scaled(expanded)
            squeezed = multiple_of_8(wide / _SQUEEZE) if squeezes else 0
            block = InvertedSizes(channels, wide, scaled(out), kernel, stride, squeezed)
            parts.append(InvertedResidual(block, act, nn.ReLU, nn.Hardsigmoid))
            channels = block.out
        wide, head = _WIDEN * channels, scaled(_HEAD)
        parts.append(ConvNorm(channels, wide, act=nn.Hardswish))
        classifier = nn.Sequential(
            nn.Linear(wide, head), nn.Hardswish(), nn.Linear(head, sizes.classes)
        )
        return trained_like(PooledClassifier(nn.Sequential(*parts), classifier), sizes)


FAMILY = image_family(
    "MobileNetV3-Large image classifier with hardswish and squeeze-excite (random weights)",
    InvertedResidualSizes,
    _mobilenet,
)
