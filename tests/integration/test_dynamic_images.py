"""Sizes that may vary do so behind a convolution that runs on a kernel, for every kind of op."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qfuse
from qfuse.targets import Target

Function = Callable[[torch.Tensor], torch.Tensor]

# In C++ some of these read sizes as numbers.
FUNCTIONS: dict[str, Function] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "nearest-exact": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, size=(14, 10), mode="bilinear"),
    "corners": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"),
    "antialias": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", antialias=True),
    "of its size": lambda x: F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] * 2)),
    "unfold": lambda x: F.fold(F.unfold(x, 3, padding=1), (9, 7), 3, padding=1),
    "fft": lambda x: torch.fft.rfft2(x).abs() * 0.1,
    "shuffle": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (4, 4)),
    "padded": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
}


class Images(nn.Module):
    """An int8 convolution, and a function of its result."""

    weight: torch.Tensor

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (8, 8, 3, 3), dtype=torch.int8))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(F.conv2d(x, self.weight.float() * 0.003, padding=1)) + 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batch_of_any_size(name: str) -> None:
    model, x = Images(FUNCTIONS[name]).eval(), torch.randn(3, 8, 9, 7)
    fast = qfuse.compile(
        model,
        (x,),
        dynamic_shapes=({0: torch.export.Dim("batch", max=64)},),
        target=Target.for_testing(isa="avx512_vnni"),
        options={"backend": "eager"},
    )

    assert re.match(r"%x: float32\[s\w+, 8, 9, 7\]", str(fast.plan)), "the batch is a symbol"
    for batch in (3, 1, 5):
        x = torch.randn(batch, 8, 9, 7)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.own_kernels
def test_compiled_code_takes_images_of_any_size() -> None:
    model, x = Images(FUNCTIONS["nearest"]).eval(), torch.randn(3, 8, 9, 7)
    dims = {axis: torch.export.Dim(f"d{axis}", min=3, max=64) for axis in (2, 3)}
    fast = qfuse.compile(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC, **dims},))

    assert fast.backend == "aoti"
    for shape in ((3, 8, 9, 7), (2, 8, 11, 12), (5, 8, 6, 6)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
