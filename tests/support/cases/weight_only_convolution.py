"""Random weight-only convolutions, what they mean, and how far from it a result may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from tests.support.cases.convolution_kernel import Window, convolved, image, in_format_of
from tests.support.cases.weight_only import ROUNDING, SUM_EPSILONS, TINY

from qfuse.kernels import (
    convolution_w4a16,
    convolution_w8a16,
    pack_groups,
    pack_transposed_values,
    pack_values,
)


@dataclass(frozen=True)
class WeightOnlyConvolution:
    """One problem. ``codes`` is torch's weight, every parameter ``[N, groups of inputs]``."""

    x: torch.Tensor
    codes: torch.Tensor
    window: Window
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    bias: torch.Tensor | None
    compute: torch.dtype = torch.float32

    @property
    def four(self) -> bool:
        return self.codes.dtype == torch.uint8

    @property
    def features(self) -> int:
        """Output channels."""
        return self.window.features(self.codes)

    def packed(self) -> torch.Tensor:
        w = self.window
        if w.transposed:
            return pack_transposed_values(self.codes, w.stride, w.dilation, w.groups)
        return pack_values(self.codes)

    def parameter(self, values: torch.Tensor) -> torch.Tensor:
        """Values as the op takes them: in groups, they are repeated for every tap."""
        if values.shape[1] > 1:
            values = values.repeat(1, prod(self.window.kernel))
        return pack_groups(values)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        zero = self.zero_point
        return (self.x, self.packed(), self.parameter(self.scale)), {
            "w_zero_point": None if zero is None else self.parameter(zero),
            "out_channels": self.features,
            "bias": self.bias,
            "compute": self.compute,
            **self.window.named(),
        }

    def run(self, **options: Any) -> torch.Tensor:
        args, given = self.arguments()
        return (convolution_w4a16 if self.four else convolution_w8a16)(
            *args, **{**given, **options}
        )

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """One value per weight, ready to broadcast over the taps."""
        w = self.window
        channels = self.codes.shape[0] // w.groups if w.transposed else self.codes.shape[1]
        values = values.repeat_interleave(channels // values.shape[1], 1)
        if w.transposed:
            values = values.reshape(w.groups, -1, channels).transpose(1, 2).flatten(0, 1)
        return values.reshape(*values.shape, *[1] * len(w.kernel))

    def steps(self) -> torch.Tensor:
        """Codes less their zero points."""
        implied = torch.tensor(8 if self.four else 0)
        zero = implied if self.zero_point is None else self.spread(self.zero_point).to(torch.int32)
        return self.codes.to(torch.int32) - zero

    def weight(self) -> torch.Tensor:
        """The weight that the op promises to multiply with, in float64."""
        if self.scale.shape[1] == 1:
            return self.steps().double() * self.spread(self.scale.float()).double()
        w = self.steps().to(self.compute) * self.spread(self.scale).to(self.compute)
        return w.to(self.x.dtype).double()

    def convolved(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return convolved(x.double().contiguous(), weight, self.window)

    def exact(self) -> torch.Tensor:
        """The result in float64."""
        y = self.convolved(self.x, self.weight())
        return y if self.bias is None else y + self._bias()

    def check(self, y: torch.Tensor) -> None:
        """Assert that ``y`` is as near to the exact result as the arithmetic allows."""
        exact = self.exact()
        terms = self.steps().double().abs() * self.spread(self.scale).double()
        magnitude = self.convolved(self.x.abs(), terms)
        magnitude = magnitude if self.bias is None else magnitude + self._bias().abs()
        eps = torch.finfo(torch.float32).eps
        allowed = SUM_EPSILONS * eps * magnitude + ROUNDING[self.x.dtype] * exact.abs()
        allowed = allowed + TINY[self.x.dtype]
        assert ((y.double() - exact).abs() <= allowed).all()
        self.check_layout(y, exact)

    def check_same(self, y: torch.Tensor) -> None:
        """Assert that ``y`` is the exact result, rounded once to the dtype of ``x``."""
        exact = self.exact()
        assert torch.equal(y, exact.float().to(self.x.dtype))
        self.check_layout(y, exact)

    def check_layout(self, y: torch.Tensor, exact: torch.Tensor) -> None:
        assert y.dtype == self.x.dtype
        batched = self.x.dim() == len(self.window.kernel) + 2
        expected = in_format_of(self.x, exact) if batched else exact.contiguous()
        assert y.stride() == expected.stride()

    def whole(self) -> WeightOnlyConvolution:
        """Return the problem with small whole numbers, so that nothing is rounded on the way."""
        x = torch.randint(-3, 4, self.x.shape).to(self.x.dtype)
        scale = 2.0 ** torch.randint(-2, 3, self.scale.shape)
        kept = torch.empty_like(self.x).copy_(x)
        return replace(self, x=kept, scale=scale, bias=None)

    def _bias(self) -> torch.Tensor:
        assert self.bias is not None
        return self.bias.double().reshape(-1, *[1] * len(self.window.kernel))


def weight_only_convolution(  # noqa: PLR0913 - what a problem can have
    shape: tuple[int, ...],
    features: int,
    w: Window,
    *,
    bits: int = 8,
    inputs: int = 1,
    dtype: torch.dtype = torch.float32,
    zero_point: bool = False,
    bias: bool = True,
    last: bool = True,
    compute: torch.dtype = torch.float32,
) -> WeightOnlyConvolution:
    """A random problem with ``x`` of ``shape``; the extremes of the codes are among them.

    Args:
        inputs: Groups of input channels with parameters of their own.
        last: Whether ``x`` is channels last, if its rank has that.
    """
    low, high, stored = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, w.weight_shape(shape[-1 - len(w.kernel)], features)).to(stored)
    codes.reshape(-1)[:2] = torch.tensor([low, high - 1], dtype=stored)[: codes.numel()]
    x = image(torch.randn(shape).to(dtype), last=last)
    grid = (features, inputs)
    return WeightOnlyConvolution(
        x=x,
        codes=codes,
        window=w,
        scale=(torch.rand(grid) * 0.01 + 0.003).to(compute).float(),
        zero_point=torch.randint(low, high, grid).to(stored) if zero_point else None,
        bias=torch.randn(features) if bias else None,
        compute=compute,
    )
