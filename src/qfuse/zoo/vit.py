"""ViT: an image classifier of attention layers over patches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qfuse.zoo._extras import transformers
from qfuse.zoo.images import ImageClassifier, ImageSizes, image_family
from qfuse.zoo.weights import cast_weights, perturb, seeded


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
        # With the library's 0.02, the branches of a small model vanish next to the residual stream.
        initializer_range=sizes.hidden**-0.5,
        attn_implementation="sdpa",
    )
    with seeded(sizes.seed):
        model = ImageClassifier(library.ViTForImageClassification(config))
        perturb(model)
        return cast_weights(model, sizes.dtype).eval()


FAMILY = image_family("ViT image classifier (random weights)", ViTSizes, _module)
