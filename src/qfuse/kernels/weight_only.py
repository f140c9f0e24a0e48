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
on the instruction set and on whether there are at most four rows, and with it their last bits; so
does whether bfloat16 below 2**-126 is taken for zero, which instructions for it do. Nothing but the
result is written to. The result is contiguous.

=================  ==============================================================================
``x``              float32, bfloat16 or float16, ``[..., K]``, one axis or more; any strides, zero
                   included. Rows at a fixed distance are read in place, others are copied.
``w_packed``       the packed weight
``w_scale``        any float dtype, taken as float32: ``[N]``, or in groups ``[ceil(N / 64), groups,
                   64]`` from :func:`qfuse.kernels.pack_groups.pack_groups`. More than one group,
                   and offsets, need groups of a multiple of 8 input features.
``w_zero_point``   ``None``, or of the same shape: uint8 0 to 15 (``None`` is 8) for
                   ``linear_w4a16``, int8 (``None`` is 0) for ``linear_w8a16``
``w_offset``       ``None``, or float of the same shape
``out_features``   ``N``
``bias``           ``None`` or float ``[N]``
``extras``         as in :mod:`qfuse.kernels.ops`, likewise ``epilogue``
``compute``        float32, bfloat16 or float16
=================  ==============================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.pack import BLOCK, GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["linear_w4a16", "linear_w8a16", "register_weight_only_fakes"]

_REAL = (torch.float32, torch.bfloat16, torch.float16)


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
    torch.library.register_fake("qfuse::linear_w4a16", _fake_linear_w4a16)
    torch.library.register_fake("qfuse::linear_w8a16", _fake_linear_w8a16)


def _fake_linear_w4a16(  # noqa: PLR0913, PLR0917 - the schema's arguments
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
    del w_scale, w_zero_point, w_offset, bias, extras, epilogue
    _check_types(x, compute, out_dtype)
    return _fake_result(x, w_packed, torch.uint8, out_features, out_dtype)


def _fake_linear_w8a16(  # noqa: PLR0913, PLR0917 - the schema's arguments
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
    del w_scale, w_zero_point, w_offset, bias, extras, epilogue
    _check_types(x, compute, out_dtype)
    return _fake_result(x, w_packed, torch.int8, out_features, out_dtype)


def _check_types(x: torch.Tensor, compute: torch.dtype, out_dtype: torch.dtype) -> None:
    if not {x.dtype, compute, out_dtype} <= set(_REAL):
        types = f"{x.dtype}, {compute} and {out_dtype}"
        raise InputError(f"x, compute and out_dtype must be floats, not {types}")


def _fake_result(
    x: torch.Tensor, w_packed: torch.Tensor, stored: torch.dtype, n: int, dtype: torch.dtype
) -> torch.Tensor:
    k = x.shape[-1]
    codes = GROUP if stored is torch.int8 else 2 * GROUP
    blocks = ((n + BLOCK - 1) // BLOCK, (k + codes - 1) // codes)
    if w_packed.dtype != stored or w_packed.shape != (*blocks, BLOCK, GROUP):
        raise InputError(f"w_packed {tuple(w_packed.shape)} does not fit n={n}, k={k}")
    return x.new_empty((*x.shape[:-1], n), dtype=dtype)
