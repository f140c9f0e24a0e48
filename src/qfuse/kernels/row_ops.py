"""Norms and activations that give codes, as Python functions, and their fake versions.

A row is read from memory once: it stays in the cache while it is normalized, measured, and encoded.
With ``x`` of shape ``[..., K]``:

1. ``x + residual`` if there is one, rounded to the dtype that torch's type promotion gives it.
2. ``rms_norm_quantized``: ``n = x / sqrt(mean(x ** 2) + eps)``, rounded to ``inner``; times
   ``weight``, rounded to ``real``. ``layer_norm_quantized``: ``(x - mean) / sqrt(variance + eps)
   * weight + bias`` with the biased variance, rounded to ``real``. ``activation_quantized``: the
   steps of an epilogue, each rounded as :mod:`qfuse.kernels.ops` says.
3. With a formula, scale and zero point are chosen for each row from its extremes, as
   :func:`qfuse.ir.quant.choose.choose_qparams` does it in the row's dtype, bit for bit if the row
   is finite; a zero point that is computed from NaN is 0. Else there is one scale for all.
4. Codes, as :func:`qfuse.ir.quant.reference.quantize` makes them with these numbers, bit for bit.
NaN
   becomes 0.

Sums are 64 float32 sums of every 64th element, added up in their order: neither the number of
threads nor the instruction set changes a bit. Nothing but the results is written to; they are
contiguous.

==============  ================================================================================
``x``           float32, bfloat16 or float16, one axis or more, any strides
``residual``    the same shape, any of these dtypes
``weight``      ``None``, or any float dtype: one number, or ``[K]``; likewise ``bias``
``extras``      at most 4 float tensors that broadcast to the shape of ``x``
==============  ================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.fakes import REAL, STORED

# How the schemas end.
_OUTPUT = (
    "out_scale", "out_zero_point", "formula", "choose_eps", "scale_dtype", "zero_point_dtype",
    "quant_min", "quant_max", "out_dtype", "compute", "reciprocal", "zero_point_first", "keep",
    "keep_sum",
)  # fmt: skip
RowResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes, scale, zero point, the float result, the sum; what there is not is an empty tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutput:
    """How rows become codes, and what else is given.

    Attributes:
        quant_min: Least code.
        quant_max: Greatest code.
        dtype: int8 or uint8.
        scale: One float of any float dtype, without a formula.
        zero_point: One number, or ``None``.
        formula: How each row's scale and zero point are chosen, a value of
            :class:`~qfuse.ir.quant.choose.Formula` but that of float8; ``""`` takes the given
            scale.
        eps: Least scale of the formula.
        scale_dtype: Of the scales that are chosen.
        zero_point_dtype: Of the zero points that are chosen.
        compute: Float dtype that encoding computes in.
        reciprocal: Multiply by the reciprocal, taken in the scale's dtype; otherwise divide.
        zero_point_first: Add the zero point before rounding instead of after.
        keep: Whether the float result is given too.
        keep_sum: Whether ``x + residual`` is given too.
    """

    quant_min: int
    quant_max: int
    dtype: torch.dtype
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    formula: str = ""
    eps: float = 0.0
    scale_dtype: torch.dtype = torch.float32
    zero_point_dtype: torch.dtype = torch.int32
    compute: torch.dtype = torch.float32
    reciprocal: bool = True
    zero_point_first: bool = False
    keep: bool = False
    keep_sum: bool = False

    def arguments(self) -> tuple[object, ...]:
        """Return them in the order of the schemas."""
        return (
            self.scale, self.zero_point, self.formula, self.eps, self.scale_dtype,
            self.zero_point_dtype, self.quant_min, self.quant_max, self.dtype, self.compute,
            self.reciprocal, self.zero_point_first, self.keep, self.keep_sum,
        )  # fmt: skip


def rms_norm_quantized(  # noqa: PLR0913 - the schema's arguments
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    output: RowOutput,
    *,
    residual: torch.Tensor | None = None,
    inner: torch.dtype = torch.float32,
    real: torch.dtype | None = None,
) -> RowResult:
    """RMSNorm and quantization; arguments as the module explains them.

    Args:
        x: Rows.
        weight: Factor per column.
        eps: Added to the mean of squares.
        output: How rows become codes.
        residual: Added to ``x`` before.
        inner: dtype of the normalized row before the weight.
        real: dtype of the norm's result; ``None`` is that of ``x``.

    Returns:
        Codes; scales and zero points ``[..., 1]`` if they were chosen; the float result and the
        sum if they are kept. What there is not is an empty tensor.

    Raises:
        RuntimeError: An argument does not fit; the message names it.
    """
    result: RowResult = torch.ops.qfuse.rms_norm_quantized.default(
        x, residual, weight, eps, inner, real or x.dtype, *output.arguments()
    )
    return result


def layer_norm_quantized(  # noqa: PLR0913 - the schema's arguments
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    output: RowOutput,
    *,
    residual: torch.Tensor | None = None,
    real: torch.dtype | None = None,
) -> RowResult:
    """Layer norm over the last axis and quantization; arguments as the module explains them.

    Args:
        x: Rows.
        weight: Factor per column.
        bias: Added per column.
        eps: Added to the variance.
        output: How rows become codes.
        residual: Added to ``x`` before.
        real: dtype of the norm's result; ``None`` is that of ``x``.

    Returns:
        As of :func:`rms_norm_quantized`.

    Raises:
        RuntimeError: An argument does not fit; the message names it.
    """
    result: RowResult = torch.ops.qfuse.layer_norm_quantized.default(
        x, residual, weight, bias, eps, real or x.dtype, *output.arguments()
    )
    return result


def activation_quantized(
    x: torch.Tensor,
    epilogue: str,
    output: RowOutput,
    extras: Sequence[torch.Tensor] = (),
    *,
    real: torch.dtype | None = None,
) -> RowResult:
    """An epilogue's steps and quantization; arguments as the module explains them.

    Args:
        x: Rows.
        epilogue: Canonical text of the steps; ``""`` only quantizes.
        output: How rows become codes.
        extras: Tensors that the epilogue names by index.
        real: dtype behind the last step; ``None`` is that of ``x``.

    Returns:
        As of :func:`rms_norm_quantized`; the sum is empty.

    Raises:
        RuntimeError: An argument does not fit; the message names it.
    """
    result: RowResult = torch.ops.qfuse.activation_quantized.default(
        x, list(extras), epilogue, real or x.dtype, *output.arguments()
    )
    return result


def register_row_fakes() -> None:
    """Tell torch the shapes and dtypes of the results; the library must have been loaded."""
    torch.library.register_fake("qfuse::rms_norm_quantized", _fake_rms_norm)
    torch.library.register_fake("qfuse::layer_norm_quantized", _fake_layer_norm)
    torch.library.register_fake("qfuse::activation_quantized", _fake_activation)


def _fake_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    inner: torch.dtype,
    real: torch.dtype,
    *output: object,
) -> RowResult:
    del weight, eps, inner
    return fake_row_results(x, residual, real, output)


def _fake_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    real: torch.dtype,
    *output: object,
) -> RowResult:
    del weight, bias, eps
    return fake_row_results(x, residual, real, output)


def _fake_activation(
    x: torch.Tensor,
    extras: Sequence[torch.Tensor] | None,
    epilogue: str,
    real: torch.dtype,
    *output: object,
) -> RowResult:
    del extras, epilogue
    return fake_row_results(x, None, real, output)


def fake_row_results(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    real: torch.dtype,
    output: Sequence[Any],
) -> RowResult:
    """Return the (fake) results of an op of rows.

    Args:
        x: A tensor of the shape of the codes.
        residual: What is added to it.
        real: dtype of the float result.
        output: The arguments that say how rows become codes, in the order of the schemas.
    """
    given = dict(zip(_OUTPUT, output, strict=True))
    formula, keep, keep_sum = given["formula"], given["keep"], given["keep_sum"]
    dtype = given["out_dtype"]
    if x.dtype not in REAL or real not in REAL:
        raise InputError(f"x and real must be floats, not {x.dtype} and {real}")
    if dtype not in STORED:
        raise InputError(f"codes must be int8 or uint8, not {dtype}")
    sum_dtype = x.dtype
    if residual is not None:
        sum_dtype = torch.promote_types(x.dtype, residual.dtype)
    row = (*x.shape[:-1], 1) if formula else (0,)
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(row, dtype=given["scale_dtype"]),
        x.new_empty(row, dtype=given["zero_point_dtype"]),
        x.new_empty(x.shape if keep else (0,), dtype=real),
        x.new_empty(x.shape if keep_sum else (0,), dtype=sum_dtype),
    )
