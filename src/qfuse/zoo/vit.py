"""ViT: an image classifier of attention layers over patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from qfuse.zoo._extras import transformers
from qfuse.zoo.family import Example, Family, Sizes
from qfuse.zoo.weights import cast_weights, perturb, seeded


@dataclass(frozen=True, kw_only=True)
class ImageSizes(Sizes):
    """Common sizes of image classifiers.

    Attributes:
        image: Height and width of the image.
        classes: Classes.
    """

    image: int = 224
    classes: int = 1000


@dataclass(frozen=True, kw_only=True)
class ViTSizes(ImageSizes):
    """Sizes of a ViT.

    Attributes:
        layers: Encoder layers.
        hidden: Width of the residual stream.
        heads: Attention heads.
        intermediate: Width inside the MLP.
        patch: Height and width of a patch.
    """

    layers: int = 4
    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    patch: int = 16

    def __post_init__(self) -> None:
        """Refuse sizes that do not divide."""
        super().__post_init__()
        self.require_multiple("hidden", "heads")
        self.require_multiple("image", "patch")


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


def _module(sizes: ViTSizes) -> nn.Module:
    library = transformers()
    config = library.ViTConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        image_size=sizes.image,
        patch_size=sizes.patch,
        num_labels=sizes.classes,
        initializer_range=sizes.hidden**-0.5,
        attn_implementation="sdpa",
    )
    with seeded(sizes.seed):
        model = ImageClassifier(library.ViTForImageClassification(config))
        perturb(model)
        return cast_weights(model, sizes.dtype).eval()


FAMILY = Family(
    description="ViT image classifier (random weights)",
    sizes=ViTSizes,
    module=_module,
    inputs=draw_images,
    axes={"pixel_values": {0: "batch"}},
    limits=image_limits,
)
