"""Blocks that several convolutional networks are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Activation = Callable[[], nn.Module]


def same_padding(kernel: int) -> int:
    """Return the padding with which a stride of 1 keeps the size, for an odd kernel."""
    return (kernel - 1) // 2


class ConvNorm(nn.Sequential):
    """A convolution, a batch norm, and an activation if there is one."""

    def __init__(
        self,
        channels: int,
        out: int,
        kernel: int = 1,
        stride: int = 1,
        *,
        groups: int = 1,
        act: Activation | None = nn.ReLU,
    ) -> None:
        padding = same_padding(kernel)
        conv = nn.Conv2d(channels, out, kernel, stride, padding, groups=groups, bias=False)
        parts: list[nn.Module] = [conv, nn.BatchNorm2d(out)]
        super().__init__(*parts, *([act()] if act is not None else []))


class SqueezeExcite(nn.Module):
    """Scales every channel by a gate that is computed from the means of all channels.

    Args:
        channels: Channels of the input.
        squeezed: Channels between the two 1 x 1 convolutions.
        act: What follows the first one.
        gate: What follows the second one.
    """

    def __init__(self, channels: int, squeezed: int, act: Activation, gate: Activation) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down = nn.Conv2d(channels, squeezed, 1)
        self.act = act()
        self.up = nn.Conv2d(squeezed, channels, 1)
        self.gate = gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, channels, height, width] of the same shape."""
        gate: torch.Tensor = self.gate(self.up(self.act(self.down(self.pool(x)))))
        return x * gate


@dataclass(frozen=True)
class InvertedSizes:
    """One inverted residual block.

    Attributes:
        channels: Channels of the input.
        expanded: Channels of the depthwise convolution; there is no expansion if they are equal.
        out: Channels of the result.
        kernel: Size of the depthwise convolution.
        stride: Its stride.
        squeezed: Channels inside squeeze-excite; 0 for none.
    """

    channels: int
    expanded: int
    out: int
    kernel: int
    stride: int
    squeezed: int


class InvertedResidual(nn.Module):
    """Expands, convolves every channel by itself, scales the channels, and projects.

    Args:
        sizes: The channels.
        act: The activation after the first two convolutions.
        squeeze_act: The activation inside squeeze-excite.
        gate: The gate of squeeze-excite.
    """

    def __init__(
        self, sizes: InvertedSizes, act: Activation, squeeze_act: Activation, gate: Activation
    ) -> None:
        super().__init__()
        wide = sizes.expanded
        parts: list[nn.Module] = []
        if wide != sizes.channels:
            parts.append(ConvNorm(sizes.channels, wide, act=act))
        parts.append(ConvNorm(wide, wide, sizes.kernel, sizes.stride, groups=wide, act=act))
        if sizes.squeezed:
            parts.append(SqueezeExcite(wide, sizes.squeezed, squeeze_act, gate))
        parts.append(ConvNorm(wide, sizes.out, act=None))
        self.body = nn.Sequential(*parts)
        self.residual = sizes.stride == 1 and sizes.channels == sizes.out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, out, height, width]; height and width are divided by the stride."""
        y: torch.Tensor = self.body(x)
        return x + y if self.residual else y


class PooledClassifier(nn.Module):
    """Features, the mean over all positions, and a classifier.

    Args:
        features: Maps images to [batch, channels, height, width].
        classifier: Maps [batch, channels] to logits.
    """

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = classifier

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, classes] for images [batch, 3, height, width]."""
        pooled = torch.flatten(self.pool(self.features(pixel_values)), 1)
        logits: torch.Tensor = self.classifier(pooled)
        return logits
