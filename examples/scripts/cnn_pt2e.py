"""Quantize a convolutional network with PT2E, compile it, and print the report."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import qfuse


def main(channels: int = 32, **options: Any) -> qfuse.CompiledModel:
    """Return the compiled model."""
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    ).eval()
    images = torch.randn(2, 3, 32, 32)
    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config())
    with torch.no_grad():
        prepared = prepare_pt2e(torch.export.export(model, (images,)).module(), quantizer)
        for _ in range(4):  # calibration: here random images, in practice some of the data
            prepared(torch.randn(2, 3, 32, 32))
    quantized = convert_pt2e(prepared)
    return qfuse.compile(quantized, (images,), **options)


if __name__ == "__main__":
    print(main().report)
