"""Compile a model whose int8 weights are scaled by hand, without a quantization library."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import qfuse


class Int8Linear(nn.Module):
    """A linear with int8 weights and one scale per output."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1) / 127
        quantized = (linear.weight.detach() / scale[:, None]).round().clamp(-127, 127)
        self.register_buffer("weight", quantized.to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] for [..., in]."""
        return nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale + self.bias


def main(width: int = 256, **options: Any) -> qfuse.CompiledModel:
    """Return the compiled model."""
    layers = (Int8Linear(nn.Linear(width, width)), nn.ReLU(), Int8Linear(nn.Linear(width, width)))
    model, x = nn.Sequential(*layers).eval(), torch.randn(8, width)
    fast = qfuse.compile(model, (x,), **options)
    with torch.no_grad():
        print(f"largest difference: {(fast(x) - model(x)).abs().max():.1e}")
    return fast


if __name__ == "__main__":
    print(main().report)
