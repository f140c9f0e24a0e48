"""The families whose weights have four bits, with a scale for each group of input features."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from qfuse.kernels import linear_w4a8, linear_w4a16, pack_grouped, pack_groups, pack_weight4
from qfuse_bench.kernels.contenders import (
    OURS,
    Arithmetic,
    Contender,
    Contenders,
    Copies,
    Family,
    Kind,
    Prepared,
    codes,
    compiled_replicas,
    qlinear,
    real_linear,
    replicas,
    scales,
)

_MIDDLE = 8  # the zero point of symmetric codes


def _weight(k: int, n: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, their scales, and the dequantized values."""
    weight = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale = scales(n, k // group)
    return weight, scale, (weight.float() - _MIDDLE) * scale.repeat_interleave(group, 1)


def _w4a8(group: int) -> Callable[[int, int, Copies], Prepared]:
    """Quantized activations with a scale per row, against weights of 8 and of 16 bits."""

    def prepare(k: int, n: int, copies: Copies) -> Prepared:
        weight, scale, real = _weight(k, n, group)
        bias = torch.randn(n)
        middle = torch.tensor([_MIDDLE], dtype=torch.int8)
        packed = pack_grouped(weight, scale, middle)
        ours = compiled_replicas(packed[:3], copies)
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


def _w4a16(group: int, dtype: torch.dtype) -> Callable[[int, int, Copies], Prepared]:
    """Float activations, against the GEMM of their dtype, whose weight is 4 or 8 times as large."""

    def prepare(k: int, n: int, copies: Copies) -> Prepared:
        weight, scale, real = _weight(k, n, group)
        bias = torch.randn(n).to(dtype)
        ours = compiled_replicas([pack_weight4(weight), pack_groups(scale)], copies)
        wide = replicas([real.to(dtype), bias], copies)

        def contenders(m: int) -> Contenders:
            x = torch.randn(m, k).to(dtype)

            def run(i: int) -> torch.Tensor:
                w, w_scale = ours[i]
                return linear_w4a16(x, w, w_scale, out_features=n, bias=bias, compute=dtype)

            return {OURS: Contender(run, len(ours)), "linear": real_linear(x, wide)}

        return contenders

    return prepare


def _grouped_bits(group: int, per_group: int) -> float:
    return 4 + per_group * 8 / group


def _stored(group: int) -> Family:
    # A scale and a short sum of the codes per group.
    kinds = {
        OURS: Kind(Arithmetic.INT8, _grouped_bits(group, 6), 1),
        "qlinear": Kind(Arithmetic.INT8, 8, 1),
        "linear bf16": Kind(Arithmetic.BF16, 16, 2),
    }
    title = f"weights of 4 bits in groups of {group}, int8 activations per token"
    return Family(title, kinds, _w4a8(group))


def _real(group: int, dtype: torch.dtype) -> Family:
    arithmetic, bits = _REAL[dtype]
    kinds = {
        OURS: Kind(arithmetic, _grouped_bits(group, 4), bits // 8),
        "linear": Kind(arithmetic, bits, bits // 8),
    }
    title = f"weights of 4 bits in groups of {group}, {arithmetic} activations"
    return Family(title, kinds, _w4a16(group, dtype))


_REAL = {torch.bfloat16: (Arithmetic.BF16, 16), torch.float32: (Arithmetic.F32, 32)}

FAMILIES: Mapping[str, Family] = {
    **{f"w4a8-g{group}": _stored(group) for group in (128, 64, 32)},
    **{f"w4a16-g{group}": _real(group, torch.bfloat16) for group in (128, 32)},
    **{f"w4a32-g{group}": _real(group, torch.float32) for group in (128, 32)},
}
"""By name."""
