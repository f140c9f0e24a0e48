"""Hand-written networks whose images are joined: they are joined as quantized values, in one copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.support.graphs.stored_images import Weight, called, compiled, dtypes_of, stored
from torch import nn

from qfuse.ir.events import Left, Missed
from qfuse.kernels import cat_channels

aten = torch.ops.aten

pytestmark = [pytest.mark.numeric, pytest.mark.own_kernels]


class Network(nn.Module):
    """Two branches of one image, and what reads both.

    Args:
        join: Makes an image of 32 channels of the results of both branches.
    """

    def __init__(self, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = Weight(16, 8, 3, 3), Weight(16, 8, 1, 1)
        self.last = Weight(8, 32, 1, 1)
        self.join = join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 8 channels."""
        x = stored(x, 0.05)
        a = F.conv2d(x, self.first(), None, 1, 1).relu()
        b = F.conv2d(x, self.second()).relu()
        return F.conv2d(self.join(a, b), self.last())


JOINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floats": lambda a, b: stored(torch.cat([a, b], 1), 0.3),
    "one scale": lambda a, b: torch.cat([stored(a, 0.3), stored(b, 0.3)], 1),
    "quantized again": lambda a, b: stored(torch.cat([stored(a, 0.3), stored(b, 0.3)], 1), 0.3),
    "other scales": lambda a, b: stored(torch.cat([stored(a, 0.3), stored(b, 0.1)], 1), 0.3),
    "other types": lambda a, b: stored(
        torch.cat([stored(a, 0.3), stored(b, 0.3, 7, torch.uint8)], 1), 0.3
    ),
    "rows": lambda a, b: torch.cat([torch.cat([stored(a, 0.3), stored(b, 0.3)], 2)] * 2, 1),
}


class Dense(nn.Module):
    """A dense block of two layers, with one scale for all values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Weight(16, 8, 3, 3), Weight(8, 32, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 8 channels."""
        x = stored(x, 0.05)
        y = stored(F.conv2d(x, self.first(), None, 1, 1).relu(), 0.05)
        return F.conv2d(torch.cat([torch.cat([x, y], 1), x], 1), self.last())


class Up(nn.Module):
    """An image that goes down and up again, beside itself, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Weight(16, 8, 3, 3), Weight(8, 32, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 8 channels."""
        x = stored(F.conv2d(stored(x, 0.05), self.first(), None, 1, 1).relu(), 0.3)
        up = F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0)
        return F.conv2d(torch.cat([stored(up, 0.3), x], 1), self.last())


IMAGE = (2, 8, 10, 10)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Network, join) for name, join in JOINS.items()},
    "dense": Dense,
    "up": Up,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_images_are_joined_as_quantized_values_without_other_copies(name: str) -> None:
    fast = compiled(NETWORKS[name](), torch.randn(IMAGE))

    joined = [cat_channels.overload, *([aten.cat.default] if name == "rows" else [])]
    assert {dtype for op in joined for dtype in dtypes_of(fast, op)} == {torch.int8}
    assert bool(dtypes_of(fast, aten.cat.default)) == (name == "rows")
    # The image that enters, and the result that leaves.
    assert len(dtypes_of(fast, aten.clone.default)) == 2
    assert not [name for name in called(fast) if name.startswith("aten.conv")]


def test_images_of_other_scales_that_are_not_quantized_again_are_joined_as_floats() -> None:
    """One scale would be inexact, and no kernel reads a scale per channel of an image."""
    model = Network(lambda a, b: torch.cat([stored(a, 0.3), stored(b, 0.1)], 1))
    fast = compiled(model, torch.randn(IMAGE))

    assert dtypes_of(fast, aten.cat.default) == [torch.float32]
    reasons = [event.reason for event in fast.plan.lowered.log.of(Missed)]
    assert any("the parts have different scales" in reason for reason in reasons)
    left = [event.reason for event in fast.plan.lowered.log.of(Left)]
    assert any("its float values are used by aten.cat" in reason for reason in left)
