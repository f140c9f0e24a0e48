"""The families whose weights have eight bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from qfuse.kernels import linear_w8a8, linear_w8a8_quantized, linear_w8a16, pack_weight
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


def _packed(weight: torch.Tensor, copies: Copies) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return copies of the packed weight with its sums."""
    return [(packed, sums) for packed, sums in compiled_replicas(pack_weight(weight), copies)]


def _w8a8(k: int, n: int, copies: Copies) -> Prepared:
    """Quantized activations with a scale per row, against one scale for all and unfused scales."""
    weight, w_scale, bias = codes(n, k), scales(n), torch.randn(n)
    ours = _packed(weight, copies)
    plain = replicas([weight], copies)
    onednn = qlinear(weight, w_scale, bias, copies)

    def contenders(m: int) -> Contenders:
        x, x_scale = codes(m, k), scales(m)
        column = x_scale[:, None]
        unsigned = (x.to(torch.int16) + 128).to(torch.uint8)

        def int_mm(i: int) -> torch.Tensor:
            # torch.compile fuses what follows `_int_mm` into one pass; this is nearly that.
            sums = torch.ops.aten._int_mm.default(x, plain[i][0].t())
            return torch.addcmul(bias, sums * column, w_scale)

        return {
            OURS: Contender(
                lambda i: linear_w8a8(x, x_scale, None, *ours[i], w_scale, bias=bias), len(ours)
            ),
            "qlinear": onednn(unsigned, torch.float32, "none"),
            "_int_mm": Contender(int_mm, len(plain)),
        }

    return contenders


def _w8a8_static(out: torch.dtype, activation: str) -> Callable[[int, int, Copies], Prepared]:
    """One scale for all rows, as static quantization has it, to another type or with a step."""

    def prepare(k: int, n: int, copies: Copies) -> Prepared:
        weight, w_scale, bias = codes(n, k), scales(n), torch.randn(n)
        ours = _packed(weight, copies)
        onednn = qlinear(weight, w_scale, bias, copies)
        steps = "" if activation == "none" else f"act({activation})"
        scale, zero = torch.tensor([0.01]), torch.tensor([128], dtype=torch.int32)
        out_scale = torch.tensor([0.05])

        def contenders(m: int) -> Contenders:
            x = (codes(m, k).to(torch.int16) + 128).to(torch.uint8)

            def stored(i: int) -> torch.Tensor:
                return linear_w8a8_quantized(
                    x, scale, zero, *ours[i], w_scale, bias=bias, epilogue=steps,
                    out_scale=out_scale, out_zero_point=zero, quant_min=0, quant_max=255,
                    out_dtype=torch.uint8,
                )  # fmt: skip

            def real(i: int) -> torch.Tensor:
                return linear_w8a8(
                    x, scale, zero, *ours[i], w_scale, bias=bias, epilogue=steps, product_dtype=out
                )

            run = stored if out == torch.uint8 else real
            return {OURS: Contender(run, len(ours)), "qlinear": onednn(x, out, activation)}

        return contenders

    return prepare


def _weight_only8(dtype: torch.dtype) -> Callable[[int, int, Copies], Prepared]:
    """Float activations; the GEMM of their dtype loads weights two or four times as large."""

    def prepare(k: int, n: int, copies: Copies) -> Prepared:
        weight, w_scale, bias = codes(n, k), scales(n), torch.randn(n)
        ours = _packed(weight, copies)
        real = replicas([(weight * w_scale[:, None]).to(dtype), bias.to(dtype)], copies)

        def contenders(m: int) -> Contenders:
            x = torch.randn(m, k).to(dtype)
            return {
                OURS: Contender(
                    lambda i: linear_w8a16(x, ours[i][0], w_scale, bias=bias), len(ours)
                ),
                "linear": real_linear(x, real),
            }

        return contenders

    return prepare


_INT8 = Kind(Arithmetic.INT8, 8, 1)
_BF16 = Kind(Arithmetic.BF16, 16, 2)
_F32 = Kind(Arithmetic.F32, 32, 4)
_STATIC = {OURS: _INT8, "qlinear": _INT8}

FAMILIES: Mapping[str, Family] = {
    "w8a8": Family(
        "int8 linears, activations per token",
        {OURS: _INT8, "qlinear": _INT8, "_int_mm": _INT8},
        _w8a8,
    ),
    "w8a16": Family(
        "int8 weights, bfloat16 activations",
        {OURS: Kind(Arithmetic.BF16, 8, 2), "linear": _BF16},
        _weight_only8(torch.bfloat16),
    ),
    "w8a32": Family(
        "int8 weights, float32 activations",
        {OURS: Kind(Arithmetic.F32, 8, 4), "linear": _F32},
        _weight_only8(torch.float32),
    ),
    "w8a8-static": Family(
        "int8 linears, one scale for all rows", _STATIC, _w8a8_static(torch.float32, "none")
    ),
    "w8a8-bf16": Family(
        "int8 linears, one scale for all rows, bfloat16 results",
        _STATIC,
        _w8a8_static(torch.bfloat16, "none"),
    ),
    "w8a8-codes": Family(
        "int8 linears, one scale for all rows, quantized results",
        _STATIC,
        _w8a8_static(torch.uint8, "none"),
    ),
    "w8a8-gelu": Family(
        "int8 linears, one scale for all rows, gelu, quantized results",
        _STATIC,
        _w8a8_static(torch.uint8, "gelu"),
    ),
}
"""By name."""
