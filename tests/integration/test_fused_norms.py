"""Norms as people write them, on the main road: every one that feeds a linear gives it codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qfuse
from qfuse.targets import Target
from qfuse.zoo import recipes


class Gemma(nn.Module):
    """Rounded behind a weight that is centred at zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.float())).type_as(x)


class T5(nn.Module):
    """The input itself is scaled, and rounded to the type of the weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(self.weight.dtype)


class Centred(nn.Module):
    """A layer norm that divides."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.bias = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.bias


class Variance(nn.Module):
    """A layer norm of ``torch.var``, its eps a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("eps", torch.tensor(2.0**-14))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.var(-1, unbiased=False, keepdim=True) + self.get_buffer("eps")
        return (x - x.mean(-1, keepdim=True)) * (1 / torch.sqrt(variance)) * self.weight


NORMS = (nn.RMSNorm, nn.LayerNorm, Gemma, T5, Centred, Variance)


class Block(nn.Module):
    """Two norms with residual sums, whose results and sums others read too."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.first, self.second = norm(32), norm(32)
        self.up, self.gate, self.down = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + residual
        y = self.first(total)
        total = total + torch.tanh(self.up(y)) * self.gate(y)
        return self.down(self.second(total)), total, y


@pytest.mark.numeric
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("recipe", "dtype"), [("w8a8-dynamic", torch.bfloat16), ("w8a8-static", torch.float32)]
)
def test_norms_as_people_write_them(norm: Any, recipe: str, dtype: torch.dtype) -> None:
    args = tuple(torch.randn(2, 3, 5, 32).to(dtype))
    model = recipes.quantize(Block(norm).to(dtype).eval(), recipe, args, {}).model
    batch = torch.export.Dim("batch", min=1, max=16)
    sizes = ({0: batch}, {0: batch}) if recipe == "w8a8-dynamic" else None
    options = {"backend": "eager"}
    fast = qfuse.compile(
        model,
        args,
        dynamic_shapes=sizes,
        target=Target.for_testing(),
        check="site",
        options=options,
    )

    report = fast.report
    assert report.fired["fuse-norm-quantize"] == 2
    assert report.rolled_back == ()
    assert all(check.passed for check in report.checks)
    for count in (3, 1, 4) if sizes else (3,):
        inputs = tuple(torch.randn(2, count, 5, 32).to(dtype))
        with torch.no_grad():
            pairs = list(zip(fast(*inputs), model(*inputs), strict=True))
        for new, old in pairs:
            assert (new.dtype, new.stride()) == (old.dtype, old.stride())
            noise = (new - old).double().square().mean() / old.double().square().mean()
            assert noise < 1e-3, "30 dB: a few flipped codes, not another function"
