"""Linears of quantized activations with groupwise weight scales along K, and their fakes.

``linear_w4a8`` takes 4-bit weights, values 0 to 15; ``linear_w8a8_grouped`` takes int8. A group has
K / groups input features: a multiple of 8 for four bits and of 4 for eight bits, or all of K with
any size; at most 32768. With ``x`` of shape ``[..., K]`` and the weight ``[N, K]``:

1. For each group ``g``, ``sum_g = sum over its k of (x - x_zero_point) * (w - w_zero_point_g)``,
   exact in int32.
2. ``total = 0``; then for each group in order ``total = total + float32(sum_g) * w_scale_g``, in
   float32, the product rounded before it is added.
3. ``y = total * x_scale + bias``, from left to right in float32 without fused multiply-add, then
   rounded to ``product_dtype``.
4. Epilogue and output are those of :mod:`qfuse.kernels.ops`, including GLUs and rowwise
   quantization.

Results do not depend on the number of threads or on the instruction set. The ops do not mutate
their arguments. The result is contiguous.

Shapes and dtypes that differ from those of :mod:`qfuse.kernels.ops`:

================  ===============================================================================
``w_packed``      :func:`qfuse.kernels.pack_groups.pack_grouped` returns these four
``w_sums``        int16 or int32 ``[ceil(N / 64), groups, 64]``: of the values, zero points not
                  subtracted
``w_scale``       float32 ``[ceil(N / 64), groups, 64]``
``w_zero_point``  ``None``, one int8, or int8 ``[ceil(N / 64), groups, 64]``
``out_features``  N
================  ===============================================================================
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.accumulator import MOST_PRODUCTS_WITH_ZERO
from qfuse.kernels.fakes import (
    check_bias_size,
    check_packed,
    check_parameters,
    check_stored,
    glu_factor,
)
from qfuse.kernels.linear_ops import linear_ops
from qfuse.kernels.pack import BLOCK, GROUP

_SUMS = (torch.int16, torch.int32)


def _columns(stored: torch.dtype, a: Any) -> int:
    """Return the number of output features; check the operands."""
    check_stored(a.x)
    n, halves = a.out_features, glu_factor(a.epilogue)
    columns, blocks = check_packed(a.x, a.w_packed, 4 if stored == torch.uint8 else 8, n, halves)
    _check_groups(a.x.shape[-1], stored, blocks, a.w_sums, a.w_scale, a.w_zero_point)
    if not a.x_scale.dtype.is_floating_point:
        raise InputError(f"x_scale must be float, not {a.x_scale.dtype}")
    check_bias_size(a.bias, n)
    return columns


def _check_groups(
    k: int,
    stored: torch.dtype,
    blocks: int,
    w_sums: torch.Tensor,
    w_scale: torch.Tensor,
    w_zero_point: torch.Tensor | None,
) -> None:
    if w_scale.dim() != 3 or not w_scale.shape[1]:  # noqa: PLR2004
        raise InputError(f"w_scale {tuple(w_scale.shape)} must be [blocks, groups, {BLOCK}]")
    groups = w_scale.shape[1]
    # The unit of a packed weight, four values or eight nibbles, must not span two groups.
    multiple = GROUP * (2 if stored == torch.uint8 else 1)
    # A single group of any length is padded with zeros like a whole row.
    if groups > 1 and k % (groups * multiple):
        raise InputError(
            f"{groups} groups of K = {k}: a group must be a multiple of {multiple} unless it is K"
        )
    if k // groups > MOST_PRODUCTS_WITH_ZERO:
        raise InputError(
            f"a group has {k // groups} elements, at most {MOST_PRODUCTS_WITH_ZERO} fit int32"
        )
    shape = (blocks, groups, BLOCK)
    check_parameters("w_scale", w_scale, (torch.float32,), shape)
    check_parameters("w_sums", w_sums, _SUMS, shape)
    if w_zero_point is not None:
        one = [tuple(w_zero_point.shape)] if w_zero_point.numel() == 1 else []
        check_parameters("w_zero_point", w_zero_point, (torch.int8,), shape, *one)


linear_w4a8, linear_w4a8_quantized, linear_w4a8_rows = linear_ops(
    "linear_w4a8", partial(_columns, torch.uint8)
)
linear_w8a8_grouped, linear_w8a8_grouped_quantized, linear_w8a8_grouped_rows = linear_ops(
    "linear_w8a8_grouped", partial(_columns, torch.int8)
)
