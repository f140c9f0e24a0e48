"""Small quantized models with something to report: fused ops, expanded ones, and leftovers."""

from __future__ import annotations

import torch
from torch import nn


class QuantizedLinear(nn.Module):
    """An int8 linear with an activation quantized with static parameters, by torch's own ops."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        self.register_buffer("weight", values)
        self.register_buffer("scale", torch.rand(outputs) * 0.01 + 1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.clamp(torch.round(x / 0.05), -128, 127).to(torch.int8)
        weight = self.weight.to(torch.float32) * self.scale.unsqueeze(1)
        return nn.functional.linear(q.to(torch.float32) * 0.05, weight)


class Block(nn.Module):
    """Two quantized linears, a float one, and a quantize that no op takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = QuantizedLinear(width, 2 * width)
        self.down = QuantizedLinear(2 * width, width)
        self.float_linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        q = torch.clamp(torch.round(torch.tanh(y) / 0.02), -128, 127).to(torch.int8)
        y = torch.sin(q.to(torch.float32) * 0.02)
        return torch.add(x, self.float_linear(y))


class Blocks(nn.Module):
    """A number of :class:`Block`, and the calls counted in a buffer."""

    calls: torch.Tensor

    def __init__(self, count: int = 1, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        for block in self.blocks:
            x = block(x)
        return x
