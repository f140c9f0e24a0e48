"""Random weights of a convolutional network with the signal of a trained one."""

from __future__ import annotations

import torch
from torch import nn

from qfuse.zoo.images import ImageSizes, draw_images
from qfuse.zoo.weights import cast_weights, measure_batch_norms, perturb

_LEAST_IMAGES = 4
_PIXELS = 2**16


def trained_like(model: nn.Module, sizes: ImageSizes) -> nn.Module:
    """Draw the weights so that the signal neither vanishes nor explodes; return the model.

    Batch norms get the statistics that random images really have there. Call it with a seeded
    generator.
    """
    model.eval()
    for part in model.modules():
        _draw(part)
    perturb(model)
    # Small images have few positions to average over in the last stages, so take more of them.
    count = max(_LEAST_IMAGES, _PIXELS // sizes.image**2)
    images: torch.Tensor = draw_images(ImageSizes(batch=count, image=sizes.image), sizes.seed)[0][0]
    measure_batch_norms(model, images)
    return cast_weights(model, sizes.dtype).eval()


def _draw(part: nn.Module) -> None:
    if isinstance(part, nn.Conv2d):
        nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
    elif isinstance(part, nn.ConvTranspose2d):
        # [in, out, *kernel]; with a stride of the kernel's size, every output has one tap.
        nn.init.normal_(part.weight, std=part.in_channels**-0.5)
    elif isinstance(part, nn.Linear):
        nn.init.normal_(part.weight, std=part.in_features**-0.5)
    elif isinstance(part, nn.BatchNorm2d):
        # With centred activations a deep random network is chaotic: it loses about a decibel
        # per layer to any noise, also to that of quantization, as trained networks do not.
        nn.init.ones_(part.bias)
