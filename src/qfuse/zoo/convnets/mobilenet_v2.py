"""MobileNetV2: inverted residual blocks with depthwise convolutions and relu6."""

from __future__ import annotations

from torch import nn

from qfuse.zoo._extras import transformers
from qfuse.zoo.convnets.sizes import ScaledSizes
from qfuse.zoo.convnets.trained_like import trained_like
from qfuse.zoo.images import ImageClassifier, image_family
from qfuse.zoo.weights import seeded


def _mobilenet(sizes: ScaledSizes) -> nn.Module:
    library = transformers()
    config = library.MobileNetV2Config(
        depth_multiplier=sizes.multiplier,
        image_size=sizes.image,
        num_labels=sizes.classes,
    )
    with seeded(sizes.seed):
        model = ImageClassifier(library.MobileNetV2ForImageClassification(config))
        return trained_like(model, sizes)


FAMILY = image_family(
    "MobileNetV2 image classifier with depthwise convolutions (random weights)",
    ScaledSizes,
    _mobilenet,
)
