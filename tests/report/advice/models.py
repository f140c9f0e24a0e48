"""What the small models with one problem each are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

SIZE = 256
_PT2E = torch.ops.quantized_decomposed

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


def weight(m: Weighted, axis: int = 0) -> torch.Tensor:
    """The weight, quantized by PT2E with one scale per index of an axis."""
    args = (m.w, m.s, m.z, axis, -128, 127, torch.int8)
    made: torch.Tensor = _PT2E.dequantize_per_channel(*args)
    return made


def by_hand(m: Weighted) -> torch.Tensor:
    """The weight, dequantized by hand."""
    made: torch.Tensor = m.w.float() * m.s[:, None]
    return made


def pointwise(m: Weighted) -> torch.Tensor:
    """The weight of a convolution of single pixels, dequantized by hand."""
    return m.w.view(1024, 64, 1, 1).float() * 0.01


def of_batch(m: Weighted) -> torch.Tensor:
    """Four weights, dequantized by hand."""
    made: torch.Tensor = m.w.view(4, SIZE // 4, SIZE).float() * m.s.view(4, -1, 1)
    return made


def static(x: torch.Tensor, scale: float = 0.05, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Quantize and dequantize as PT2E does, with one scale."""
    info = torch.iinfo(dtype)
    args = (scale, 0, info.min, info.max, dtype)
    made: torch.Tensor = _PT2E.dequantize_per_tensor(_PT2E.quantize_per_tensor(x, *args), *args)
    return made


def rounded(x: torch.Tensor, low: int = -128, high: int = 127) -> torch.Tensor:
    """Quantize and dequantize by hand."""
    return torch.clamp(torch.round(x / 0.05), low, high).to(torch.int8).float() * 0.05


def dynamic(x: torch.Tensor, divisor: float = 127.0, least: float | None = 1e-12) -> torch.Tensor:
    """Quantize and dequantize by hand, with a scale per row."""
    most = x.abs().amax(-1, keepdim=True)
    scale = (most if least is None else most.clamp(min=least)) / divisor
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8).float() * scale


def linear(m: Weighted, x: torch.Tensor) -> torch.Tensor:
    """A linear whose operands are quantized by PT2E."""
    return F.linear(static(x), weight(m))


def _gains_of_weight(m: Weighted, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, by_hand(m) * torch.arange(1.0, SIZE + 1))


def _gains_of_activation(m: Weighted, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x * torch.arange(1.0, SIZE + 1), by_hand(m))


GAINS = _gains_of_weight, _gains_of_activation
"""Linears with a factor for each input feature: on the weight, and on the activation."""


def heads(x: torch.Tensor) -> torch.Tensor:
    """An operand of attention: batch, heads, positions, features."""
    return static(x.view(1, 4, 16, SIZE))


def in_parts(x: torch.Tensor) -> torch.Tensor:
    """Attention by ops that quantize everything that is multiplied."""
    scores = heads(x) @ heads(x).transpose(-1, -2) / SIZE**0.5
    return static(torch.softmax(scores, -1), 1 / 127) @ heads(x)


def per_feature(m: Weighted, x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize with one scale per feature of the input."""
    args = (m.s, m.z, 1, -128, 127, torch.int8)
    made: torch.Tensor = _PT2E.dequantize_per_channel(_PT2E.quantize_per_channel(x, *args), *args)
    return made


def quantized(model: nn.Module) -> nn.Module:
    """Quantize the linears of a model with torchao."""
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def one_linear() -> nn.Module:
    """A float model."""
    return nn.Sequential(nn.Linear(SIZE, SIZE)).eval()


class Convolved(nn.Module):
    """A convolution of an image; its operands are quantized by PT2E, along an axis, or not."""

    w: torch.Tensor

    def __init__(self, *, by_pt2e: bool, axis: int = 0, per_image: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.register_buffer("w", torch.randint(-127, 127, (32, 32, 3, 3)).to(torch.int8))
        self.register_buffer("s", torch.full((32,), 0.01))
        self.register_buffer("z", torch.zeros(32, dtype=torch.int64))
        self._by_pt2e, self._axis, self._per_image = by_pt2e, axis, per_image

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._by_pt2e:
            made: torch.Tensor = self.conv(x)
            return made
        args = (self.w, self.s, self.z, self._axis, -128, 127, torch.int8)
        if self._per_image:
            scale = x.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-9) / 127
            q = torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8)
            return F.conv2d(q.float() * scale, _PT2E.dequantize_per_channel(*args), padding=1)
        return F.conv2d(static(x), _PT2E.dequantize_per_channel(*args), padding=1)


class Grouped(nn.Module):
    """A linear whose weight has a scale per group of input features."""

    w: torch.Tensor
    s: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        shape = (SIZE, SIZE // size, size)
        self.register_buffer("w", torch.randint(-127, 127, shape).to(torch.int8))
        self.register_buffer("s", torch.rand(SIZE, SIZE // size, 1) * 0.01 + 0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(static(x), (self.w.float() * self.s).flatten(1))


class Recurrent(nn.Module):
    """A recurrent layer of torch, or its steps with quantized linears."""

    def __init__(self, *, as_linears: bool) -> None:
        super().__init__()
        if as_linears:
            self.inner, self.state = (nn.Linear(SIZE, SIZE) for _ in range(2))
            quantize_(self, Int8DynamicActivationInt8WeightConfig())
        else:
            self.rnn = nn.RNN(SIZE, SIZE, batch_first=True)
        self._as_linears = as_linears

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._as_linears:
            made: torch.Tensor = self.rnn(x)[0]
            return made
        h, results = torch.zeros_like(x[:, 0]), []
        for step in self.inner(x).unbind(1):
            h = torch.tanh(step + self.state(h))
            results.append(h)
        return torch.stack(results, 1)


def sequences() -> tuple[torch.Tensor, ...]:
    """Sixteen sequences of three steps."""
    return (torch.randn(16, 3, SIZE),)


def images() -> tuple[torch.Tensor, ...]:
    """Two images."""
    return (torch.randn(2, 32, 28, 28),)


def shifted(m: Weighted, x: torch.Tensor, zero_point: int) -> torch.Tensor:
    """A linear of values that are quantized by hand with a zero point."""
    q = torch.clamp(torch.round(x / 0.05) + zero_point, 0, 255).to(torch.uint8)
    return F.linear((q.float() - zero_point) * 0.05, by_hand(m))


def activations(count: int = 1, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Random activations of 64 rows."""
    return tuple(torch.randn(64, SIZE, dtype=dtype) for _ in range(count))


def integers() -> tuple[torch.Tensor, ...]:
    """Quantized activations of 64 rows, their scales, and zero points in int32."""
    q = torch.randint(-128, 128, (64, SIZE)).to(torch.int8)
    return q, torch.rand(64, 1) * 0.02 + 0.01, torch.randint(-9, 9, (64, 1)).to(torch.int32)
