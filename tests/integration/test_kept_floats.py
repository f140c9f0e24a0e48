"""Convolutions whose float result is used beside its quantized values: computed once, not copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.graphs.stored_images import Weight, called, compiled, dtypes_of, stored
from torch import nn

from qfuse.ir.events import Left

aten = torch.ops.aten

pytestmark = [pytest.mark.numeric, pytest.mark.own_kernels]

Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Network(nn.Module):
    """A convolution, another one of its quantized result, and what uses both float results.

    Args:
        use: Makes an image of 16 channels of the results.
    """

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.first, self.second = Weight(16, 8, 3, 3), Weight(16, 16, 3, 3)
        self.last = Weight(8, 16, 1, 1)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 8 channels."""
        y = F.conv2d(stored(x, 0.05), self.first(), None, 1, 1).relu()
        z = F.conv2d(stored(y, 0.1), self.second(), None, 1, 1)
        return F.conv2d(stored(self.use(y, z), 0.3), self.last())


USES: dict[str, Use] = {
    "sum": lambda y, z: z + y,
    "difference": lambda y, z: y - 0.5 * z,
    "pool": lambda y, z: F.avg_pool2d(y, 3, 1, 1) + z,
    "gate": lambda y, z: z * torch.sigmoid(y.mean((2, 3), keepdim=True)),
    "other parameters": lambda y, z: stored(y, 0.07, -4) + z,
    "up": lambda y, z: F.interpolate(F.avg_pool2d(y, 2), scale_factor=2.0) + z,
}


@pytest.mark.parametrize("name", USES)
def test_a_float_result_is_computed_once_and_not_copied(name: str) -> None:
    fast = compiled(Network(USES[name]), torch.randn(2, 8, 10, 10))

    assert len([n for n in called(fast) if n.startswith("qfuse.convolution")]) == 3
    # The image that enters, and the result that leaves.
    assert len(dtypes_of(fast, aten.clone.default)) == 2
    reasons = [event.reason for event in fast.plan.lowered.log.of(Left)]
    assert any("qfuse.convolution has other users besides this quantize" in r for r in reasons)
