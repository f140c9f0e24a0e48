"""What all image models of the zoo share: sizes, inputs, and a wrapper for `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from qfuse.zoo.family import Example, Family, Sizes


@dataclass(frozen=True, kw_only=True)
class ImageSizes(Sizes):
    """Common sizes of image models.

    Attributes:
        image: Height and width of the image.
        classes: Classes.
    """

    image: int = 224
    classes: int = 1000


S = TypeVar("S", bound=ImageSizes)


class ImageClassifier(nn.Module):
    """A `transformers` image classifier that returns only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, classes] for images [batch, 3, height, width]."""
        logits: torch.Tensor = self.model(pixel_values=pixel_values).logits
        return logits


def draw_images(sizes: ImageSizes, seed: int) -> Example:
    """Draw images of normally distributed pixels, as a normalized photograph has."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(sizes.batch, 3, sizes.image, sizes.image, generator=draw)
    return (images.to(sizes.dtype),), {}


def image_limits(sizes: ImageSizes) -> Mapping[str, int]:
    """Return the greatest batch."""
    return {"batch": max(64, sizes.batch)}


def image_family(description: str, sizes: type[S], module: Callable[[S], nn.Module]) -> Family[S]:
    """Return a family of models whose only input is a batch of images."""
    axes = {"pixel_values": {0: "batch"}}
    return Family(description, sizes, module, draw_images, axes, image_limits)
