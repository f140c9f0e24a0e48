"""ResNet and MobileNetV2: image classifiers of convolutions and batch norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from qfuse.ir.errors import OptionsError
from qfuse.zoo._extras import transformers
from qfuse.zoo.family import Family
from qfuse.zoo.vit import ImageClassifier, ImageSizes, draw_images, image_limits
from qfuse.zoo.weights import cast_weights, measure_batch_norms, perturb, seeded

_LEAST_IMAGES = 4
_PIXELS = 2**16


@dataclass(frozen=True, kw_only=True)
class ResNetSizes(ImageSizes):
    """Sizes of a ResNet with bottleneck blocks.

    Attributes:
        width: Channels after the stem; stage i has 4 * 2**i times as many.
        depths: Blocks of each stage: 3,4,6,3 is ResNet-50.
    """

    width: int = 64
    depths: tuple[int, ...] = (3, 4, 6, 3)

    def __post_init__(self) -> None:
        """Refuse a network without stages."""
        super().__post_init__()
        if not self.depths:
            raise OptionsError("a ResNet needs a stage", fix="give depths as in depths=3,4,6,3")


@dataclass(frozen=True, kw_only=True)
class MobileNetSizes(ImageSizes):
    """Sizes of a MobileNetV2.

    Attributes:
        multiplier: Factor on the number of channels.
    """

    multiplier: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a network without channels."""
        super().__post_init__()
        if self.multiplier <= 0:
            raise OptionsError(f"multiplier={self.multiplier} leaves no channels", fix="give 1.0")


def _resnet(sizes: ResNetSizes) -> nn.Module:
    library = transformers()
    config = library.ResNetConfig(
        embedding_size=sizes.width,
        hidden_sizes=[sizes.width * 4 * 2**stage for stage in range(len(sizes.depths))],
        depths=list(sizes.depths),
        layer_type="bottleneck",
        num_labels=sizes.classes,
    )
    with seeded(sizes.seed):
        return _trained_like(library.ResNetForImageClassification(config), sizes)


def _mobilenet(sizes: MobileNetSizes) -> nn.Module:
    library = transformers()
    config = library.MobileNetV2Config(
        depth_multiplier=sizes.multiplier,
        image_size=sizes.image,
        num_labels=sizes.classes,
    )
    with seeded(sizes.seed):
        return _trained_like(library.MobileNetV2ForImageClassification(config), sizes)


def _trained_like(model: nn.Module, sizes: ImageSizes) -> nn.Module:
    """Keep the signal from vanishing or exploding, as in a trained network."""
    classifier = ImageClassifier(model).eval()
    for part in classifier.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=part.in_features**-0.5)
        elif isinstance(part, nn.BatchNorm2d):
            # With centred activations a deep random network is chaotic: it loses about a decibel
            # per layer to any noise, also to that of quantization, as trained networks do not.
            nn.init.ones_(part.bias)
    perturb(classifier)
    # Small images have few positions to average over in the last stages, so take more of them.
    count = max(_LEAST_IMAGES, _PIXELS // sizes.image**2)
    images: torch.Tensor = draw_images(ImageSizes(batch=count, image=sizes.image), sizes.seed)[0][0]
    measure_batch_norms(classifier, images)
    return cast_weights(classifier, sizes.dtype).eval()


RESNET = Family(
    description="ResNet image classifier with bottleneck blocks (random weights)",
    sizes=ResNetSizes,
    module=_resnet,
    inputs=draw_images,
    axes={"pixel_values": {0: "batch"}},
    limits=image_limits,
)
MOBILENET = Family(
    description="MobileNetV2 image classifier with depthwise convolutions (random weights)",
    sizes=MobileNetSizes,
    module=_mobilenet,
    inputs=draw_images,
    axes={"pixel_values": {0: "batch"}},
    limits=image_limits,
)
