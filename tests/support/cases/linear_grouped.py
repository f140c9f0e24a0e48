"""Random linears with weights in groups, and their reference, one rounding after another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.support.cases.linear_kernel import codes, per_row

from qfuse.kernels import (
    linear_w4a8,
    linear_w4a8_quantized,
    linear_w8a8_grouped,
    linear_w8a8_grouped_quantized,
    pack_grouped,
)

BITS = (4, 8)
ZEROS = ("none", "one", "each")


@dataclass(frozen=True)
class Grouped:
    """One problem. ``weight`` holds codes ``[N, K]``, ``w_scale`` and zero points ``[N, groups]``."""

    x: torch.Tensor
    weight: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    x_zero_point: torch.Tensor | None = None
    w_zero_point: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def four(self) -> bool:
        return self.weight.dtype == torch.uint8

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        packed = pack_grouped(self.weight, self.w_scale, self.w_zero_point)
        args = (self.x, self.x_scale, self.x_zero_point, *packed)
        return args, {"out_features": len(self.weight), "bias": self.bias, **self.options}

    def run(self) -> torch.Tensor:
        args, options = self.arguments()
        return (linear_w4a8 if self.four else linear_w8a8_grouped)(*args, **options)

    def run_quantized(self, **output: Any) -> torch.Tensor:
        args, options = self.arguments()
        op = linear_w4a8_quantized if self.four else linear_w8a8_grouped_quantized
        return op(*args, **{**options, **output})

    def sums(self) -> torch.Tensor:
        """The integer products of each group, exactly: ``[..., N, groups]``."""
        x, w = self.x.double(), self.weight.double()
        groups = self.w_scale.shape[1]
        if self.x_zero_point is not None:
            x = x - per_row(self.x_zero_point.double(), x)
        grouped = w.reshape(len(w), groups, w.shape[1] // groups)
        if self.w_zero_point is not None:
            grouped = grouped - self.w_zero_point.double().expand(len(w), groups)[..., None]
        pieces = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
        return torch.einsum("...gk,ngk->...ng", pieces, grouped)

    def expected(self) -> torch.Tensor:
        """The linear in float32, in the order that the op promises."""
        total = torch.zeros(*self.x.shape[:-1], len(self.weight))
        for sums, scale in zip(self.sums().float().unbind(-1), self.w_scale.unbind(1), strict=True):
            total = total + sums * scale.float()
        y = total * per_row(self.x_scale.float(), self.x)
        return y if self.bias is None else y + self.bias.float()

    def with_options(self, **options: Any) -> Grouped:
        return replace(self, options={**self.options, **options})


def grouped(  # noqa: PLR0913 - what a problem can have
    shape: tuple[int, ...],
    n: int,
    groups: int,
    *,
    bits: int = 4,
    dtype: torch.dtype = torch.int8,
    per_token: bool = True,
    zero_point: bool = False,
    weight_zeros: str = "one",
    bias: bool = True,
) -> Grouped:
    """A random problem with ``x`` of ``shape``; no scale is a power of two."""
    count = int(torch.Size(shape[:-1]).numel()) if per_token else 1
    low, high = (-128, 128) if dtype == torch.int8 else (0, 256)
    four = bits == min(BITS)
    size = (n, shape[-1])
    weight = torch.randint(0, 16, size, dtype=torch.uint8) if four else codes(size, torch.int8)
    middle = 8 if four else 3
    each = torch.randint(0, 16, (n, groups)) if four else torch.randint(-128, 128, (n, groups))
    zeros = {"none": None, "one": torch.tensor([middle]), "each": each}
    return Grouped(
        x=codes(shape, dtype),
        weight=weight,
        x_scale=torch.rand(count) * 0.01 + 0.003,
        w_scale=torch.rand(n, groups) * 0.01 + 0.003,
        x_zero_point=torch.randint(low, high, (count,), dtype=torch.int32) if zero_point else None,
        w_zero_point=zeros[weight_zeros],
        bias=torch.randn(n) if bias else None,
    )
