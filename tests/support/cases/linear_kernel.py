"""Random int8 linears, their exact reference, and how far from it a result may be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qfuse.kernels import linear_w8a8, linear_w8a8_quantized, pack_weight

STORED = (torch.int8, torch.uint8)
REAL = (torch.float32, torch.bfloat16, torch.float16)

# Largest error of an activation over [-20, 20] against float64, in units of float32's epsilon times
# max(|y|, floor). Arguments are exact in float32. What cancels in an activation cancels in torch's float32 version too.
ACTIVATION_ERROR = {
    "gelu": (3.0, 4.0),  # x * (1 + erf), whose sum cancels on the left
    "gelu_tanh": (3.0, 1.0),  # x / (1 + e^-2u): u is rounded, then its error multiplied
    "silu": (3.0, 0.0),
    "sigmoid": (3.0, 0.0),
    "tanh": (3.0, 0.0),
    "hardswish": (2.0, 0.0),
    "hardsigmoid": (2.0, 0.0),
    "elu,1.0,1.0,1.0": (3.0, 0.0),
    "elu,0.75,1.25,0.5": (3.0, 0.0),
    "elu,-0.5,1.0,-0.25": (3.0, 0.0),  # grows to the left
    "mish": (4.0, 0.0),
    "squared_relu": (1.0, 0.0),
    "quick_gelu,1.75": (3.0, 1.0),  # x / (1 + e^-ax): ax is rounded, then its error multiplied
}


def codes(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random quantized values, extremes included."""
    info = torch.iinfo(dtype)
    q = torch.randint(info.min, info.max + 1, shape, dtype=dtype)
    flat = q.reshape(-1)
    flat[: min(2, flat.numel())] = torch.tensor([info.min, info.max], dtype=dtype)[: flat.numel()]
    return q


@dataclass(frozen=True)
class Linear:
    """One problem. ``weight`` is [N, K]; everything else is what the op takes."""

    x: torch.Tensor
    weight: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    x_zero_point: torch.Tensor | None = None
    w_zero_point: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        packed, sums = pack_weight(self.weight, self.w_zero_point)
        args = (self.x, self.x_scale, self.x_zero_point, packed, sums, self.w_scale)
        return args, {"w_zero_point": self.w_zero_point, "bias": self.bias, **self.options}

    def run(self) -> torch.Tensor:
        args, options = self.arguments()
        return linear_w8a8(*args, **options)

    def run_quantized(self, **output: Any) -> torch.Tensor:
        args, options = self.arguments()
        return linear_w8a8_quantized(*args, **{**options, **output})

    def total(self) -> torch.Tensor:
        """The integer product, exactly."""
        x, w = self.x.long(), self.weight.long()
        if self.x_zero_point is not None:
            x = x - per_row(self.x_zero_point.long(), x)
        if self.w_zero_point is not None:
            w = w - self.w_zero_point.long().reshape(-1, 1)
        return x @ w.t()

    def expected(self) -> torch.Tensor:
        """The linear in float32, in the order that the op promises."""
        y = self.total().float() * per_row(self.x_scale.float(), self.x) * self.w_scale.float()
        return y if self.bias is None else y + self.bias.float()

    def with_options(self, **options: Any) -> Linear:
        return replace(self, options={**self.options, **options})


def per_row(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One value per row of ``x``, or one for all, to broadcast against its last axis."""
    return values.reshape(()) if values.numel() == 1 else values.reshape(*x.shape[:-1], 1)


def linear(  # noqa: PLR0913 - what a problem can have
    shape: tuple[int, ...],
    n: int,
    *,
    dtype: torch.dtype = torch.int8,
    per_token: bool = True,
    zero_point: bool = False,
    weight_zero_point: bool = False,
    bias: bool = True,
) -> Linear:
    """A random problem with ``x`` of ``shape``; no scale is a power of two."""
    count = int(torch.Size(shape[:-1]).numel()) if per_token else 1
    low, high = (-128, 128) if dtype == torch.int8 else (0, 256)
    return Linear(
        x=codes(shape, dtype),
        weight=codes((n, shape[-1]), torch.int8),
        x_scale=torch.rand(count) * 0.01 + 0.003,
        w_scale=torch.rand(n) * 0.01 + 0.003,
        x_zero_point=torch.randint(low, high, (count,), dtype=torch.int32) if zero_point else None,
        w_zero_point=torch.randint(-8, 8, (n,), dtype=torch.int32) if weight_zero_point else None,
        bias=torch.randn(n) if bias else None,
    )


def identity(values: torch.Tensor) -> Linear:
    """A linear whose product is zero, so that ``add(0,1.0)`` starts the epilogue from ``values``."""
    n = values.shape[-1]
    return Linear(
        x=torch.zeros(values.shape[0], 4, dtype=torch.int8),
        weight=torch.zeros(n, 4, dtype=torch.int8),
        x_scale=torch.ones(1),
        w_scale=torch.ones(n),
    ).with_options(extras=[values])


def views_of_rows(rows: int, k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random matrices of ``k`` columns in many layouts, by a name of the layout."""
    wide = torch.randn(rows, 3, 2 * k).to(dtype)
    row = torch.randn(1, k).to(dtype)
    return {
        "slice of columns": wide[:, 0, 5 : 5 + k],
        "slice of rows": wide[:, ::2, :k],
        "transpose": torch.randn(k, rows).to(dtype).t(),
        "expanded row": row.expand(rows, k),
        "row of stride 1": row.as_strided((1, k), (1, 1)),
        "row of stride 0": row.as_strided((1, k), (0, 1)),
        "every second column": wide[:, 1, ::2],
    }
