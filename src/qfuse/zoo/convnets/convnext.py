"""ConvNeXt: depthwise 7 x 7 convolutions, layer norms over the channels, and linears."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qfuse.zoo._extras import transformers
from qfuse.zoo.convnets.sizes import require_stages
from qfuse.zoo.convnets.trained_like import trained_like
from qfuse.zoo.images import ImageClassifier, ImageSizes, image_family
from qfuse.zoo.weights import seeded

_STAGES = 4
# A fresh model scales its branches by 1e-6, as if it had none; trained ones are around this.
_LAYER_SCALE, _SPREAD = 0.3, 0.1


@dataclass(frozen=True, kw_only=True)
class ConvNextSizes(ImageSizes):
    """Sizes of a ConvNeXt; the defaults are those of ConvNeXt-T.

    Attributes:
        width: Channels of the first stage; every further stage has twice as many.
        depths: Blocks of each stage.
    """

    width: int = 96
    depths: tuple[int, ...] = (3, 3, 9, 3)

    def __post_init__(self) -> None:
        """Refuse too many stages."""
        super().__post_init__()
        require_stages(self.depths, _STAGES)


def _convnext(sizes: ConvNextSizes) -> nn.Module:
    library = transformers()
    config = library.ConvNextConfig(
        num_stages=len(sizes.depths),
        hidden_sizes=[sizes.width * 2**stage for stage in range(len(sizes.depths))],
        depths=list(sizes.depths),
        image_size=sizes.image,
        num_labels=sizes.classes,
    )
    with seeded(sizes.seed):
        model = ImageClassifier(library.ConvNextForImageClassification(config))
        for name, value in model.named_parameters():
            if name.endswith("layer_scale_parameter"):
                nn.init.normal_(value, _LAYER_SCALE, _SPREAD)
        return trained_like(model, sizes)


FAMILY = image_family(
    "ConvNeXt image classifier with layer norms and linears (random weights)",
    ConvNextSizes,
    _convnext,
)
