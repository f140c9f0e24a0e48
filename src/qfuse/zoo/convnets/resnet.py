"""ResNet: residual sums after every block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qfuse.ir.errors import OptionsError
from qfuse.zoo._extras import transformers
from qfuse.zoo.convnets.trained_like import trained_like
from qfuse.zoo.images import ImageClassifier, ImageSizes, image_family
from qfuse.zoo.weights import seeded

_EXPANSION = 4


@dataclass(frozen=True, kw_only=True)
class ResNetSizes(ImageSizes):
    """Sizes of a ResNet with bottleneck blocks; the defaults are those of ResNet-50.

    Attributes:
        width: Channels after the stem; stage i has 4 * 2**i times as many.
        depths: Blocks of each stage.
    """

    width: int = 64
    depths: tuple[int, ...] = (3, 4, 6, 3)

    def __post_init__(self) -> None:
        """Refuse a network without stages."""
        super().__post_init__()
        if not self.depths:
            raise OptionsError("a ResNet needs a stage", fix="give depths as in depths=3,4,6,3")


@dataclass(frozen=True, kw_only=True)
class BasicResNetSizes(ResNetSizes):
    """Sizes of a ResNet with blocks of two 3 x 3 convolutions; the defaults are those of ResNet-18.

    Stage i has 2**i times as many channels as the stem.
    """

    depths: tuple[int, ...] = (2, 2, 2, 2)


def _resnet(sizes: ResNetSizes) -> nn.Module:
    library = transformers()
    basic = isinstance(sizes, BasicResNetSizes)
    first = sizes.width if basic else sizes.width * _EXPANSION
    config = library.ResNetConfig(
        embedding_size=sizes.width,
        hidden_sizes=[first * 2**stage for stage in range(len(sizes.depths))],
        depths=list(sizes.depths),
        layer_type="basic" if basic else "bottleneck",
        num_labels=sizes.classes,
    )
    with seeded(sizes.seed):
        model = ImageClassifier(library.ResNetForImageClassification(config))
        return trained_like(model, sizes)


RESNET50 = image_family(
    "ResNet image classifier with bottleneck blocks (random weights)", ResNetSizes, _resnet
)
RESNET18 = image_family(
    "ResNet image classifier with basic blocks (random weights)", BasicResNetSizes, _resnet
)
