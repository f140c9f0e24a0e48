"""Networks for images of any size run on quantized values like those for one size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.graphs.stored_images import Weight, called, compiled, stored
from torch import nn
from torch.export import Dim

pytestmark = [pytest.mark.numeric, pytest.mark.own_kernels]


class Stem(nn.Module):
    """The first layers of a ResNet: the pool is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            Weight(16, 8, 7, 7),
            Weight(16, 16, 3, 3),
            Weight(9, 16),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 9 logits."""
        y = F.conv2d(stored(x, 0.02), self.first(), None, 2, 3).relu()
        y = F.max_pool2d(stored(y, 0.1), 3, 2, 1)
        y = F.conv2d(y, self.second(), None, 1, 1).relu()
        return F.linear(stored(y.mean((2, 3)), 0.05), self.last())


class Shuffled(nn.Module):
    """Half of the channels is convolved, and the channels of both halves are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            Weight(16, 8, 3, 3),
            Weight(8, 8, 3, 3),
            Weight(8, 16, 1, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 8 channels."""
        y = stored(F.conv2d(stored(x, 0.05), self.first(), None, 1, 1).relu(), 0.1)
        a, b = y.chunk(2, 1)
        b = stored(F.conv2d(b, self.second(), None, 1, 1).relu(), 0.1)
        return F.conv2d(F.channel_shuffle(torch.cat([a, b], 1), 2), self.last())


class Grouped(nn.Module):
    """Groups of few channels, with strides and a size that is read on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            Weight(16, 2, 3, 3),
            Weight(32, 2, 3, 3),
            Weight(8, 32, 1, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 8 channels, as rows of pixels."""
        y = stored(F.conv2d(stored(x, 0.05), self.first(), None, 1, 1, 1, 4).relu(), 0.1)
        y = F.conv2d(y, self.second(), None, 2, 1, 1, 8).relu()
        y = F.conv2d(stored(y, 0.2), self.last())
        return y.reshape(y.shape[0], y.shape[1], y.shape[2] * y.shape[3])


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "stem": Stem,
    "shuffled": Shuffled,
    "grouped": Grouped,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_product_is_of_quantized_values(name: str) -> None:
    sizes = {0: Dim("n", max=8), 2: Dim("h", min=9, max=64), 3: Dim("w", min=9, max=64)}
    images = [torch.randn(n, 8, h, w) for n, h, w in ((1, 9, 9), (3, 21, 16), (2, 12, 12))]
    fast = compiled(NETWORKS[name](), images[-1], *images, dynamic_shapes=(sizes,))

    names = called(fast)
    assert not [n for n in names if n.startswith("aten.conv") or "a16" in n]
    assert len([n for n in names if "convolution_w8a8_quantized" in n]) >= 1 + (name != "stem")
