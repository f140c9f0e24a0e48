"""A model for bisection, also from the command line."""

from __future__ import annotations

import torch
from torch import nn


class Twice(nn.Module):
    """Two linears, each with a tanh."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return torch.tanh(self.second(y))


def twice() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model with inputs."""
    return Twice().eval(), (torch.randn(64, 8, generator=torch.Generator().manual_seed(5)),)
