"""Random int8 products of two activations, and their exact reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.support.cases.linear_kernel import codes

from qfuse.kernels import matmul_a8a8, matmul_a8a8_quantized

SIGNS = (torch.int8, torch.uint8)
GRANULARITIES = ("tensor", "lines", "entries")
"""One scale; one per row on the left and per column on the right; one per batch entry."""


@dataclass(frozen=True)
class Product:
    """One problem: everything is what the op takes."""

    x: torch.Tensor
    x_scale: torch.Tensor
    x_zero_point: torch.Tensor | None
    other: torch.Tensor
    other_scale: torch.Tensor
    other_zero_point: torch.Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            *(self.x, self.x_scale, self.x_zero_point),
            *(self.other, self.other_scale, self.other_zero_point),
        )

    def run(self) -> torch.Tensor:
        return matmul_a8a8(*self.arguments, **self.options)

    def run_quantized(self, **output: Any) -> torch.Tensor:
        return matmul_a8a8_quantized(*self.arguments, **{**self.options, **output})

    def total(self) -> torch.Tensor:
        """The integer product, exactly."""
        x, other = self.x.long(), self.other.long()
        x = x if self.x_zero_point is None else x - self.x_zero_point.long()
        other = other if self.other_zero_point is None else other - self.other_zero_point.long()
        return torch.matmul(x, other)

    def expected(self) -> torch.Tensor:
        """The product in float32, in the order that the op promises."""
        return self.total().float() * self.x_scale.float() * self.other_scale.float()

    def with_options(self, **options: Any) -> Product:
        return replace(self, options={**self.options, **options})


def parameters(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, line: int, *, zero_point: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random scales and zero points of an operand; no scale is a power of two.

    Args:
        shape: The operand's.
        dtype: Its storage.
        kind: One of ``GRANULARITIES``.
        line: The axis that is not summed, -2 or -1.
        zero_point: Whether there are zero points.
    """
    grid = [1] * len(shape)
    if kind != "tensor":
        grid[:-2] = shape[:-2]
    if kind == "lines":
        grid[line] = shape[line]
    info = torch.iinfo(dtype)
    zero = torch.randint(info.min, info.max + 1, grid, dtype=torch.int32)
    return torch.rand(grid) * 0.01 + 0.003, zero if zero_point else None


def product(
    x: tuple[int, ...],
    other: tuple[int, ...],
    *,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.int8, torch.int8),
    kinds: tuple[str, str] = ("tensor", "tensor"),
    zero_points: tuple[bool, bool] = (False, False),
    transposed: bool = False,
) -> Product:
    """A random problem of two shapes; a transposed operand is a view."""
    stored = (*other[:-2], other[-1], other[-2]) if transposed else other
    right = codes(stored, dtypes[1])
    return Product(
        codes(x, dtypes[0]),
        *parameters(x, dtypes[0], kinds[0], -2, zero_point=zero_points[0]),
        right.transpose(-1, -2) if transposed else right,
        *parameters(other, dtypes[1], kinds[1], -1, zero_point=zero_points[1]),
    )
