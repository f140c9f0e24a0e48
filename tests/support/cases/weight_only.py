"""Random weight-only linears, what they mean, and how far from it a result may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qfuse.kernels import linear_w4a16, linear_w8a16, pack_groups, pack_weight, pack_weight4

# A sum of K products in float32 in any order: K/2 roundings of the sum of magnitudes at worst, in
# practice the square root of that; and one rounding of the result to the dtype of `x`.
SUM_EPSILONS = 4.0
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Half of the least number of float16: results below its normal numbers are rounded to whole ones.
TINY = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}
# The least number of float32: sums below its normal numbers are rounded to whole ones.
LEAST_FLOAT32 = 2.0**-149
# One product is rounded once to float32.
PRODUCT_EPSILONS = 1.0
STREAMED_ROWS = 4


@dataclass(frozen=True)
class WeightOnly:
    """One problem. ``codes`` is [N, K], every parameter [N, groups]."""

    x: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    offset: torch.Tensor | None
    bias: torch.Tensor | None
    compute: torch.dtype

    @property
    def four(self) -> bool:
        return self.codes.dtype == torch.uint8

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        packed = pack_weight4(self.codes) if self.four else pack_weight(self.codes)[0]
        zero, offset = self.zero_point, self.offset
        return (self.x, packed, pack_groups(self.scale)), {
            "w_zero_point": None if zero is None else pack_groups(zero),
            "w_offset": None if offset is None else pack_groups(offset),
            "out_features": self.codes.shape[0],
            "bias": self.bias,
            "compute": self.compute,
        }

    def run(self, **options: Any) -> torch.Tensor:
        args, given = self.arguments()
        return (linear_w4a16 if self.four else linear_w8a16)(*args, **{**given, **options})

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """One value per weight."""
        groups = values.shape[1]
        return values.repeat_interleave(self.codes.shape[1] // groups if groups > 1 else 1, 1)

    def steps(self, dtype: torch.dtype) -> torch.Tensor:
        """Codes less their zero points."""
        implied = 8 if self.four else 0
        zero = implied if self.zero_point is None else self.spread(self.zero_point.to(torch.int32))
        return (self.codes.to(torch.int32) - zero).to(dtype)

    def dequantized(self) -> torch.Tensor:
        """The weight as a dequantize in the source gives it."""
        w = self.steps(self.compute) * self.spread(self.scale).to(self.compute)
        if self.offset is not None:
            w = w + self.spread(self.offset).to(self.compute)
        return w.to(self.x.dtype)

    def unrounded(self) -> torch.Tensor:
        """The weight that this stands for."""
        w = self.steps(torch.float64) * self.spread(self.scale).double()
        return w if self.offset is None else w + self.spread(self.offset).double()

    def meant(self) -> torch.Tensor:
        """The weight that the op promises to multiply with, in float64."""
        rows = self.x.shape[:-1].numel()
        one = self.scale.shape[1] == 1 and self.offset is None
        return self.unrounded() if one or rows <= STREAMED_ROWS else self.dequantized().double()

    def check(self, y: torch.Tensor) -> None:
        """Assert that ``y`` is as near to the exact result as the arithmetic allows."""
        x, w = self.x.double(), self.meant()
        bias = torch.zeros(()) if self.bias is None else self.bias.double()
        exact = x @ w.t() + bias
        terms = self.steps(torch.float64).abs() * self.spread(self.scale).double()
        if self.offset is not None:
            terms = terms + self.spread(self.offset).double().abs()
        magnitude = x.abs() @ terms.t() + bias.abs()
        eps = torch.finfo(torch.float32).eps
        allowed = SUM_EPSILONS * eps * magnitude + ROUNDING[self.x.dtype] * exact.abs()
        allowed = allowed + TINY[self.x.dtype]
        assert y.dtype == self.x.dtype
        assert y.shape == exact.shape
        assert ((y.double() - exact).abs() <= allowed).all()


def weight_only(  # noqa: PLR0913 - what a problem can have
    shape: tuple[int, ...],
    n: int,
    groups: int = 1,
    *,
    bits: int = 4,
    dtype: torch.dtype = torch.float32,
    zero_point: bool = False,
    offset: bool = False,
    bias: bool = True,
    compute: torch.dtype = torch.float32,
) -> WeightOnly:
    """A random problem with ``x`` of ``shape``; the least and greatest codes are among them."""
    low, high, stored = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, (n, shape[-1])).to(stored)
    codes.reshape(-1)[:2] = torch.tensor([low, high - 1], dtype=stored)[: codes.numel()]
    zero = torch.randint(low, high, (n, groups)).to(stored)
    zero.reshape(-1)[:2] = torch.tensor([high - 1, low], dtype=stored)[: zero.numel()]
    return WeightOnly(
        x=torch.randn(shape).to(dtype),
        codes=codes,
        scale=(torch.rand(n, groups) * 0.01 + 0.003).to(compute).float(),
        zero_point=zero if zero_point else None,
        offset=(torch.randn(n, groups) * 0.05).to(compute).float() if offset else None,
        bias=torch.randn(n) if bias else None,
        compute=compute,
    )
