"""The families whose weights have four bits, with a scale for each group of input features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qfuse.bench.kernel_contenders import (
    OURS,
    Arithmetic,
    Contender,
    Contenders,
    Family,
    Kind,
    codes,
    qlinear,
    real_linear,
    replicas,
    scales,
)
from qfuse.kernels import linear_w4a8, pack_grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from qfuse.bench.kernel_contenders import Copies, Prepared

__all__ = ["FAMILIES"]

_MIDDLE = 8  # the zero point of symmetric codes


def _weight(k: int, n: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, their scales, and the numbers that they stand for."""
    weight = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale = scales(n, k // group)
    return weight, scale, (weight.float() - _MIDDLE) * scale.repeat_interleave(group, 1)


def _w4a8(group: int) -> Callable[[int, int, Copies], Prepared]:
    """Stored activations with a scale per row, against weights of 8 and of 16 bits."""

    def prepare(k: int, n: int, copies: Copies) -> Prepared:
        weight, scale, real = _weight(k, n, group)
        bias = torch.randn(n)
        middle = torch.tensor([_MIDDLE], dtype=torch.int8)
        packed = pack_grouped(weight, scale, middle)
        ours = replicas(packed[:3], copies)
        onednn = qlinear(codes(n, k), scales(n), bias, copies)
        narrow = replicas([real.bfloat16(), bias.bfloat16()], copies)

        def contenders(m: int) -> Contenders:
            x, x_scale = codes(m, k), scales(m)
            unsigned = (x.to(torch.int16) + 128).to(torch.uint8)
            rounded = (x * x_scale[:, None]).bfloat16()

            def run(i: int) -> torch.Tensor:
                w, sums, w_scale = ours[i]
                return linear_w4a8(
                    x, x_scale, None, w, sums, w_scale, middle, out_features=n, bias=bias
                )

            return {
                OURS: Contender(run, len(ours)),
                "qlinear": onednn(unsigned, torch.float32, "none"),
                "linear bf16": real_linear(rounded, narrow),
            }

        return contenders

    return prepare


def _grouped_bits(group: int, per_group: int) -> float:
    return 4 + per_group * 8 / group


FAMILIES: Mapping[str, Family] = {
    f"w4a8-g{group}": Family(
        f"weights of 4 bits in groups of {group}, int8 activations per token",
        {
            # A scale and a sum of the codes per group.
            OURS: Kind(Arithmetic.INT8, _grouped_bits(group, 8), 1),
            "qlinear": Kind(Arithmetic.INT8, 8, 1),
            "linear bf16": Kind(Arithmetic.BF16, 16, 2),
        },
        _w4a8(group),
    )
    for group in (128, 64, 32)
}
"""By name."""
