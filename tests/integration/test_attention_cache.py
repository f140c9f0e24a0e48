"""Attention over a KV cache of int8 values with scales of their own, across calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.attention_models import KERNEL, compiled, decomposed, kernels, products, static
from torch import nn

pytestmark = [
    pytest.mark.own_kernels,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

BATCH, SHARED, GROUP, PLACES, WIDTH = 2, 2, 4, 256, 64
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def repeat_kv(x: torch.Tensor) -> torch.Tensor:
    """Repeat heads as transformers does."""
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, GROUP, s, d).reshape(b, h * GROUP, s, d)


class Cached(nn.Module):
    """Keys and values that are written to a cache; all queries see what was written so far.

    Args:
        scales: The shape of the scales of keys: chosen per token, given per head, or per tensor.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def __init__(self, scales: tuple[int, ...]) -> None:
        super().__init__()
        shape = (BATCH, SHARED, PLACES, WIDTH)
        self.register_buffer("k", torch.zeros(shape, dtype=torch.int8))
        self.register_buffer("v", torch.zeros(shape, dtype=torch.int8))
        self.register_buffer("k_scale", torch.full(scales, 0.03))
        self.register_buffer("v_scale", torch.full((1, SHARED, 1, 1), 0.02))
        self.per_token = scales[2] == PLACES

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Write and attend."""
        scale = self.k_scale
        if self.per_token:
            scale = k.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
            self.k_scale.index_copy_(2, at, scale)
        self.k.index_copy_(2, at, stored(k, scale))
        self.v.index_copy_(2, at, stored(v, self.v_scale))
        keys = repeat_kv(self.k.float() * self.k_scale)
        scores = static(q, 0.03, 3) @ keys.mT * 0.125
        seen = torch.arange(PLACES) <= at[-1]
        weights = static(torch.softmax(scores.masked_fill(~seen, -1e9), -1), 1 / 255, -128)
        return weights @ repeat_kv(self.v.float() * self.v_scale)


def stored(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantize by hand."""
    return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)


def step(start: int, rows: int) -> Inputs:
    """Return queries, keys and values of some tokens, and their places."""
    heads = SHARED * GROUP
    return (
        torch.randn(BATCH, heads, rows, WIDTH),
        torch.randn(BATCH, SHARED, rows, WIDTH),
        torch.randn(BATCH, SHARED, rows, WIDTH),
        torch.arange(start, start + rows),
    )


@pytest.mark.numeric
@pytest.mark.parametrize(
    "scales", [(BATCH, SHARED, PLACES, 1), (1, SHARED, 1, 1), (1, 1, 1, 1)], ids=str
)
def test_a_cache_that_is_written(scales: tuple[int, ...]) -> None:
    model = Cached(scales)
    source = copy.deepcopy(model)
    fast = compiled(model, step(0, 8))

    assert fast.report.rolled_back == ()
    assert kernels(fast) == [KERNEL] * 2
    # The buffers are written and read as they are: no copy of a head, no float keys.
    assert "aten.expand" not in str(fast.plan)
    for start in (0, 8, 16):
        args = step(start, 8)
        with torch.no_grad():
            want, got = source(*args), fast(*args)
        noise = (got - want).double().square().mean() / want.double().square().mean()
        assert noise < 1e-3, "30 dB: a few flipped codes, not another function"


class Given(nn.Module):
    """Keys and their scales are inputs, dequantized by an op."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        zero: Any = torch.zeros(scale.shape, dtype=torch.int64)
        bounds = (-128, 127, torch.int8)
        if self.kind == "tensor":
            keys = decomposed.dequantize_per_tensor.tensor(k, scale, zero, *bounds)
        elif self.kind == "head":
            keys = decomposed.dequantize_per_channel(k, scale, zero, 1, *bounds)
        elif self.kind == "token":
            keys = decomposed.dequantize_per_token(k, scale, zero, *bounds, torch.float32)
        else:
            keys = scale * k.to(torch.float32)
        scores: torch.Tensor = static(q, 0.03, 3) @ keys.mT
        return scores


SCALES: dict[str, tuple[int, ...]] = {
    "tensor": (),
    "head": (8,),
    "token": (2, 8, 80, 1),
    "by hand, per tensor": (),
    "by hand, per head": (8, 1, 1),
    "by hand, per token": (2, 8, 80, 1),
}


@pytest.mark.numeric
@pytest.mark.parametrize("kind", SCALES)
def test_scales_that_are_inputs(kind: str) -> None:
    model = Given(kind)
    args = (
        torch.randn(2, 8, 48, WIDTH),
        torch.randint(-128, 128, (2, 8, 80, WIDTH), dtype=torch.int8),
        torch.rand(SCALES[kind]) * 0.05 + 0.01,
    )
    fast = compiled(model, args)

    assert kernels(fast) == [KERNEL]
    for sign in (1, -1):
        given = (args[0] * 2, args[1].flip(2), args[2] * sign)
        torch.testing.assert_close(fast(*given), model(*given), rtol=1e-4, atol=1e-4)


class Values(nn.Module):
    """Each token of the values has a scale of its own."""

    def forward(self, w: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return static(w, 1 / 127) @ (v.float() * scale)


@pytest.mark.numeric
def test_a_scale_of_each_token_of_the_values_is_along_the_sum() -> None:
    args = (
        torch.rand(2, 8, 48, 80),
        torch.randint(-128, 128, (2, 8, 80, WIDTH), dtype=torch.int8),
        torch.rand(2, 8, 80, 1) * 0.05,
    )
    fast = compiled(Values(), args)

    assert kernels(fast) == ["expand"]
    torch.testing.assert_close(fast(*args), Values()(*args), rtol=1e-4, atol=1e-4)
    (event,) = products(fast)
    assert "along the axis that is summed" in str(event)
