"""Linears of real activations with packed weights, as Python functions, and their fake versions.

``linear_w4a16`` takes codes of four bits, 0 to 15, from :func:`qfuse.kernels.pack4.pack_weight4`;
``linear_w8a16`` takes int8 from :func:`qfuse.kernels.pack.pack_weight`. With ``x`` of shape
``[..., K]`` and a weight of ``N`` output features, whose input features fall into groups of equal
size that have parameters of their own:

1. ``w = (code - zero_point) * scale + offset``, rounded to ``compute`` after the product and after
   the sum, and then to the dtype of ``x``, as a dequantize in the source graph does it.
2. ``y = sum over k of x * w + bias``, summed in float32, then rounded to the dtype of ``x``.
   float32 is multiplied in float32, bfloat16 in bfloat16 where the processor has instructions for
   it, else in float32; float16 in float32.
3. The epilogue's steps in order, as :mod:`qfuse.kernels.ops` says.

In two cases a scale is multiplied with sums and not with weights, which are then whole numbers and
exact in every dtype. Weights are not rounded there: the result is nearer to what the source means.

- One group without offsets, for any number of rows: ``y = (sum of x * (code - zero_point)) * scale
  + bias``.
- At most four rows: the sum over groups, in their order, of ``(sum of x * (code - zero_point)) *
  scale + (sum of x) * offset``.

No value depends on the number of threads. Sums of more than a few terms have an order that depends
on the instruction set, and with it their last bits, on whether there are at most four rows, and
in bfloat16 with instructions for it on whether there are at most two: sums then have two parts
(four bits), or are made of float32 (eight bits), where making bfloat16 costs more than it saves.
Whether bfloat16 below 2**-126 is taken for zero, which those instructions do, depends on the same.
Nothing but the result is written to. The result is contiguous.

=================  ==============================================================================
``x``              float32, bfloat16 or float16, ``[..., K]``, one axis or more; any strides, zero
                   included. Rows at a fixed distance are read in place, others are copied.
``w_packed``       the packed weight
``w_scale``        any float dtype, taken as float32: ``[N]``, or in groups ``[ceil(N / 64), groups,
                   64]`` from :func:`qfuse.kernels.pack_groups.pack_groups`. More than one group,
                   and offsets, need groups of a multiple of 8 input features.
``w_zero_point``   ``None``, or of the same shape: uint8 0 to 15 (``None`` is 8) for
                   ``linear_w4a16``, where higher bits are ignored; int8 (``None`` is 0) for
                   ``linear_w8a16``
``w_offset``       ``None``, or float of the same shape
``out_features``   ``N``
``bias``           ``None`` or float ``[N]``
``extras``         as in :mod:`qfuse.kernels.ops`, likewise ``epilogue``
``compute``        float32, bfloat16 or float16
=================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.fakes import (
    check_bias,
    check_packed,
    check_parameters,
    check_real,
    halves_of,
)
from qfuse.kernels.pack import BLOCK

GROUP_MULTIPLE = 8
"""Several groups, and groups with offsets, begin at multiples of this many input features."""


def linear_w4a16(  # noqa: PLR0913 - the schema's arguments
    x: torch.Tensor,
    w_packed: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    w_zero_point: torch.Tensor | None = None,
    w_offset: torch.Tensor | None = None,
    out_features: int | None = None,
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
    epilogue: str = "",
    compute: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Linear of a real activation with a weight of 4-bit codes; arguments as the module explains.

    Args:
        x: Activation.
        w_packed: Packed codes.
        w_scale: Their scales.
        w_zero_point: Their zero points.
        w_offset: What is added after scaling.
        out_features: ``N``; may be left out if the scales are ``[N]``.
        bias: Added before the epilogue.
        extras: Tensors that the epilogue names by index.
        epilogue: Canonical text of the steps.
        compute: dtype that weights are dequantized in.
        out_dtype: dtype behind the last step; ``None`` is that of ``x``.

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        RuntimeError: An argument does not fit; the message names it. While tracing, what can be
            seen of that is an InputError.
    """
    n = _features(w_scale, out_features)
    result: torch.Tensor = torch.ops.qfuse.linear_w4a16.default(
        x, w_packed, w_scale, w_zero_point, w_offset, n, bias, list(extras), epilogue, compute,
        out_dtype or x.dtype,
    )  # fmt: skip
    return result


def linear_w8a16(  # noqa: PLR0913 - the schema's arguments
    x: torch.Tensor,
    w_packed: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    w_zero_point: torch.Tensor | None = None,
    w_offset: torch.Tensor | None = None,
    out_features: int | None = None,
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
    epilogue: str = "",
    compute: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Linear of a real activation with an int8 weight; arguments as the module explains them.

    Args:
        x: Activation.
        w_packed: Packed weight.
        w_scale: Its scales.
        w_zero_point: Its zero points.
        w_offset: What is added after scaling.
        out_features: ``N``; may be left out if the scales are ``[N]``.
        bias: Added before the epilogue.
        extras: Tensors that the epilogue names by index.
        epilogue: Canonical text of the steps.
        compute: dtype that weights are dequantized in.
        out_dtype: dtype behind the last step; ``None`` is that of ``x``.

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        RuntimeError: An argument does not fit; the message names it. While tracing, what can be
            seen of that is an InputError.
    """
    n = _features(w_scale, out_features)
    result: torch.Tensor = torch.ops.qfuse.linear_w8a16.default(
        x, w_packed, w_scale, w_zero_point, w_offset, n, bias, list(extras), epilogue, compute,
        out_dtype or x.dtype,
    )  # fmt: skip
    return result


def _features(w_scale: torch.Tensor, out_features: int | None) -> int:
    if out_features is not None:
        return out_features
    if w_scale.dim() != 1:
        raise InputError(
            f"w_scale {tuple(w_scale.shape)} does not say how many output features there are",
            fix="give out_features",
        )
    return w_scale.shape[0]


def register_weight_only_fakes() -> None:
    """Tell torch the shapes and dtypes of the results; the library must have been loaded."""
    for name, stored in (("linear_w4a16", torch.uint8), ("linear_w8a16", torch.int8)):
        torch.library.register_fake(f"qfuse::{name}", partial(_fake_linear, stored))


def _fake_linear(  # noqa: PLR0913, PLR0917 - the schema's arguments
    stored: torch.dtype,
    x: torch.Tensor,
    w_packed: torch.Tensor,
    w_scale: torch.Tensor,
    w_zero_point: torch.Tensor | None,
    w_offset: torch.Tensor | None,
    out_features: int,
    bias: torch.Tensor | None,
    extras: Sequence[torch.Tensor] | None,
    epilogue: str,
    compute: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    del extras
    check_real(x, compute=compute, out_dtype=out_dtype)
    if halves_of(epilogue) != 1:
        raise InputError(f"this kernel multiplies no halves: {epilogue!r}")
    n, blocks = check_packed(x, w_packed, stored, out_features)
    groups = w_scale.shape[1] if w_scale.dim() == 3 else 1  # noqa: PLR2004
    _check_groups(x.shape[-1], groups, whole=groups == 1 and w_offset is None)
    shapes = [(blocks, groups, BLOCK), *([(n,)] if groups == 1 else [])]
    check_parameters("w_scale", w_scale, None, *shapes)
    if w_zero_point is not None:
        check_parameters("w_zero_point", w_zero_point, (stored,), *shapes)
    if w_offset is not None:
        check_parameters("w_offset", w_offset, None, *shapes)
    check_bias(bias, n)
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)


def _check_groups(k: int, groups: int, *, whole: bool) -> None:
    if whole:
        return
    if groups < 1 or k % groups or k // groups % GROUP_MULTIPLE:
        raise InputError(
            f"groups, and weights with offsets, must be of a multiple of {GROUP_MULTIPLE} input "
            f"features; here {groups} groups share {k}"
        )
