"""Linears of stored activations whose weights have scales in groups along K, and their fakes.

``linear_w4a8`` takes weights of four bits, codes 0 to 15; ``linear_w8a8_grouped`` takes int8. A
group is K / groups input features: a multiple of 8 for four bits and of 4 for eight, or the whole
of K, of any size then; at most 32768. With ``x`` of shape ``[..., K]`` and the weight ``[N, K]``:

1. For each group ``g``, ``sum_g = sum over its k of (x - x_zero_point) * (w - w_zero_point_g)``,
   exact in int32.
2. ``total = 0``; then for each group in order ``total = total + float32(sum_g) * w_scale_g``, in
   float32, the product rounded before it is added.
3. ``y = total * x_scale + bias``, from left to right in float32 without fused multiply-add, then
   rounded to ``real``.
4. Epilogue and output are those of :mod:`qfuse.kernels.ops`, products of halves and codes of rows
   included.

No value depends on the number of threads or on the instruction set. Nothing but the result is
written to. The result is contiguous.

Shapes and dtypes, where they are not those of :mod:`qfuse.kernels.ops`:

================  ===============================================================================
``w_packed``      :func:`qfuse.kernels.pack_groups.pack_grouped` gives these four
``w_sums``        int16 or int32 ``[ceil(N / 64), groups, 64]``: of the codes, zero points not
                  subtracted
``w_scale``       float32 ``[ceil(N / 64), groups, 64]``
``w_zero_point``  ``None``, one int8, or int8 ``[ceil(N / 64), groups, 64]``
``out_features``  N
================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.fakes import (
    REAL,
    STORED,
    check_bias,
    check_packed,
    check_parameters,
    check_stored,
    halves_of,
)
from qfuse.kernels.pack import BLOCK, GROUP
from qfuse.kernels.row_ops import RowOutput, RowResult, fake_row_results

_SUMS = (torch.int16, torch.int32)
# Sums of a group are exact in int32 up to here.
_MOST_IN_GROUP = 1 << 15


def linear_w4a8(  # noqa: PLR0913, PLR0917 - the schema's arguments
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero_point: torch.Tensor | None,
    w_packed: torch.Tensor,
    w_sums: torch.Tensor,
    w_scale: torch.Tensor,
    w_zero_point: torch.Tensor | None,
    *,
    out_features: int,
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
    epilogue: str = "",
    real: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Linear of a stored activation with a four-bit weight; arguments as the module explains them.

    Args:
        x: Stored activation.
        x_scale: Its scale.
        x_zero_point: Its zero point.
        w_packed: Packed codes.
        w_sums: Their sums.
        w_scale: Scales of the groups.
        w_zero_point: Zero points of the groups.
        out_features: How many output features there are.
        bias: Added before the epilogue.
        extras: Tensors that the epilogue names by index.
        epilogue: Canonical text of the steps.
        real: dtype of the linear's own result.
        out_dtype: dtype behind the last step; ``None`` is ``real``.

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        RuntimeError: An argument does not fit; the message names it. While tracing, what can be
            seen of that is an InputError.
    """
    result: torch.Tensor = torch.ops.qfuse.linear_w4a8.default(
        x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, out_features, bias,
        list(extras), epilogue, real, out_dtype or real,
    )  # fmt: skip
    return result


def linear_w8a8_grouped(  # noqa: PLR0913, PLR0917 - the schema's arguments
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero_point: torch.Tensor | None,
    w_packed: torch.Tensor,
    w_sums: torch.Tensor,
    w_scale: torch.Tensor,
    w_zero_point: torch.Tensor | None,
    *,
    out_features: int,
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
    epilogue: str = "",
    real: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Like :func:`linear_w4a8`, with an int8 weight.

    Args:
        x: Stored activation.
        x_scale: Its scale.
        x_zero_point: Its zero point.
        w_packed: Packed weight.
        w_sums: Its sums.
        w_scale: Scales of the groups.
        w_zero_point: Zero points of the groups.
        out_features: How many output features there are.
        bias: Added before the epilogue.
        extras: Tensors that the epilogue names by index.
        epilogue: Canonical text of the steps.
        real: dtype of the linear's own result.
        out_dtype: dtype behind the last step; ``None`` is ``real``.

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        RuntimeError: As :func:`linear_w4a8` does.
    """
    result: torch.Tensor = torch.ops.qfuse.linear_w8a8_grouped.default(
        x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, out_features, bias,
        list(extras), epilogue, real, out_dtype or real,
    )  # fmt: skip
    return result


def linear_w4a8_quantized(*args: Any, **options: Any) -> torch.Tensor:
    """:func:`linear_w4a8` with a result that is quantized per tensor.

    Args:
        *args: Those of :func:`linear_w4a8`.
        **options: Those of :func:`linear_w4a8`, and of the output as
            :func:`qfuse.kernels.ops.linear_w8a8_quantized` takes them: ``out_scale``,
            ``out_zero_point``, ``quant_min``, ``quant_max``, ``reciprocal``, ``zero_point_first``,
            ``out_dtype``.

    Returns:
        ``[..., N]`` of ``out_dtype``.
    """
    return _quantized(torch.ops.qfuse.linear_w4a8_quantized.default, args, options)


def linear_w8a8_grouped_quantized(*args: Any, **options: Any) -> torch.Tensor:
    """:func:`linear_w8a8_grouped` with a result that is quantized per tensor.

    Args:
        *args: Those of :func:`linear_w8a8_grouped`.
        **options: As of :func:`linear_w4a8_quantized`.

    Returns:
        ``[..., N]`` of ``out_dtype``.
    """
    return _quantized(torch.ops.qfuse.linear_w8a8_grouped_quantized.default, args, options)


def linear_w4a8_rows(*args: Any, output: RowOutput, **options: Any) -> RowResult:
    """:func:`linear_w4a8` whose rows become codes with scales of their own.

    Args:
        *args: Those of :func:`linear_w4a8`.
        output: How rows become codes; there is no sum to keep.
        **options: Those of :func:`linear_w4a8`, with ``float_dtype`` for ``out_dtype``.

    Returns:
        As of :func:`qfuse.kernels.row_ops.activation_quantized`.
    """
    return _rows(torch.ops.qfuse.linear_w4a8_rows.default, args, options, output)


def linear_w8a8_grouped_rows(*args: Any, output: RowOutput, **options: Any) -> RowResult:
    """:func:`linear_w8a8_grouped` whose rows become codes with scales of their own.

    Args:
        *args: Those of :func:`linear_w8a8_grouped`.
        output: How rows become codes; there is no sum to keep.
        **options: As of :func:`linear_w4a8_rows`.

    Returns:
        As of :func:`qfuse.kernels.row_ops.activation_quantized`.
    """
    return _rows(torch.ops.qfuse.linear_w8a8_grouped_rows.default, args, options, output)


_DEFAULTS: dict[str, Any] = {
    "bias": None,
    "extras": (),
    "epilogue": "",
    "real": torch.float32,
}


def _quantized(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    defaults = {**_DEFAULTS, "reciprocal": True, "zero_point_first": False}
    result: torch.Tensor = op(*args, **{**defaults, **options})
    return result


def _rows(op: Any, args: tuple[Any, ...], options: dict[str, Any], output: RowOutput) -> RowResult:
    given = {**_DEFAULTS, **options}
    names = ("out_features", "bias", "extras", "epilogue", "real")
    rest = [given.pop(name) for name in names]
    float_dtype = given.pop("float_dtype", None) or rest[-1]
    result: RowResult = op(*args, *rest, float_dtype, *output.arguments(), **given)
    return result


def register_grouped_fakes() -> None:
    """Tell torch the shapes and dtypes of the results; the library must have been loaded."""
    for name, stored in (("linear_w4a8", torch.uint8), ("linear_w8a8_grouped", torch.int8)):
        torch.library.register_fake(f"qfuse::{name}", partial(_fake_float, stored))
        torch.library.register_fake(f"qfuse::{name}_quantized", partial(_fake_codes, stored))
        torch.library.register_fake(f"qfuse::{name}_rows", partial(_fake_rows, stored))


# The arguments that all of the ops begin with.
_LEADING = 12


def _fake_float(stored: torch.dtype, *args: Any) -> torch.Tensor:
    return _fake_result(stored, args[:_LEADING], args[_LEADING], REAL)


def _fake_codes(stored: torch.dtype, *args: Any) -> torch.Tensor:
    return _fake_result(stored, args[:_LEADING], args[-1], STORED)


def _fake_rows(stored: torch.dtype, *args: Any) -> RowResult:
    real = args[_LEADING]
    rows = _fake_result(stored, args[:_LEADING], real, REAL)
    return fake_row_results(rows, None, real, args[_LEADING + 1 :])


def _fake_result(
    stored: torch.dtype,
    args: tuple[Any, ...],
    dtype: torch.dtype,
    possible: tuple[torch.dtype, ...],
) -> torch.Tensor:
    """Return the result of an op with weights of a type."""
    x, x_scale, _, w_packed, *parameters, n, bias, _, epilogue, real = args
    check_stored(x)
    if real not in REAL:
        raise InputError(f"real must be one of {REAL}, not {real}")
    if dtype not in possible:
        raise InputError(f"the result must be one of {possible}, not {dtype}")
    columns, blocks = check_packed(x, w_packed, stored, n, halves_of(epilogue))
    _check_groups(x.shape[-1], stored, blocks, *parameters)
    if not x_scale.dtype.is_floating_point:
        raise InputError(f"x_scale must be float, not {x_scale.dtype}")
    check_bias(bias, n)
    result: torch.Tensor = x.new_empty((*x.shape[:-1], columns), dtype=dtype)
    return result


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
    multiple = GROUP * (2 if stored == torch.uint8 else 1)
    if groups > 1 and k % (groups * multiple):
        raise InputError(
            f"{groups} groups of K = {k}: a group must be a multiple of {multiple} unless it is K"
        )
    if k // groups > _MOST_IN_GROUP:
        raise InputError(f"a group has {k // groups} elements, at most {_MOST_IN_GROUP} fit int32")
    shape = (blocks, groups, BLOCK)
    check_parameters("w_scale", w_scale, (torch.float32,), shape)
    check_parameters("w_sums", w_sums, _SUMS, shape)
    if w_zero_point is not None:
        one = [tuple(w_zero_point.shape)] if w_zero_point.numel() == 1 else []
        check_parameters("w_zero_point", w_zero_point, (torch.int8,), shape, *one)
