"""A model with quantized and float weights, for the problems of suggestions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SIZE = 256
Forward = Callable[..., Any]


class Weighted(nn.Module):
    """A model of one function, with an int8 weight ``w``, its scales ``s`` and a float one ``f``."""

    w: torch.Tensor
    f: torch.Tensor
    s: torch.Tensor
    z: torch.Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = (SIZE, SIZE)
        weight = torch.randint(-127, 127, shape, generator=generator).to(torch.int8)
        self.register_buffer("w", weight)
        self.register_buffer("f", torch.randn(shape, generator=generator))
        self.register_buffer("s", torch.rand(SIZE, generator=generator) * 0.01 + 0.001)
        self.register_buffer("z", torch.zeros(SIZE, dtype=torch.int64))
        self._forward = forward

    def forward(self, *args: torch.Tensor) -> Any:
        return self._forward(self, *args)
