"""Rowwise kernels: norms and activations with a quantized result, and their fakes.

A row is read from memory once and stays in the cache while it is normalized, reduced and quantized.
With ``x`` of shape ``[..., K]``:

0. 8-bit values are dequantized: ``(x - x_zero_point) * x_scale`` in float32, rounded to
   ``x_dtype``; likewise ``residual``.
1. ``x + residual`` if there is one, rounded to the dtype of torch's type promotion.
2. ``rms_norm_quantized``: ``n = x / sqrt(mean(x ** 2) + eps)``, rounded to ``inner``; times
   ``weight``, rounded to ``float_dtype``. ``layer_norm_quantized``: ``(x - mean) /
   sqrt(variance + eps) * weight + bias`` with the biased variance, rounded to ``float_dtype``.
   ``activation_quantized``: the epilogue ops, each rounded as described in
   :mod:`qfuse.kernels.ops`.
3. With a formula, scale and zero point are computed per row from its minimum and maximum, as in
   :func:`qfuse.ir.quant.choose.choose_qparams` in the row's dtype, bit for bit if the row is
   finite; a zero point computed from NaN is 0. Otherwise a static per-tensor scale is used.
4. The row is quantized as in :func:`qfuse.ir.quant.reference.quantize`, bit for bit. NaN becomes
   0.

Sums consist of 64 float32 sums of every 64th element, added by halves, so results do not depend on
the number of threads or on the instruction set. The ops do not mutate their arguments. Results are
contiguous.

===============  ===============================================================================
``x``            float32, bfloat16, float16, int8 or uint8, at least one axis, any strides
``x_scale``      for 8-bit values, any float dtype: one number, or one per row
``x_zero_point`` ``None``, or numbers like ``x_scale``
``x_dtype``      dtype of the floats; default that of ``x``
``residual``     the same shape, any of these dtypes; with arguments like those of ``x``
``weight``       ``None``, or any float dtype: one number, or ``[K]``; likewise ``bias``
``extras``       at most 4 float tensors that broadcast to the shape of ``x``
``output``       a :class:`RowwiseOutput`
``inner``        dtype of the normalized row before the weight
``float_dtype``  dtype of the float result; default that of ``x``
===============  ===============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.errors import InputError
from qfuse.kernels.op import KernelOp

RowwiseResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Quantized values, scale, zero point, float result, sum; absent ones are empty tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowwiseOutput:
    """How rows are quantized, and the extra outputs.

    Attributes:
        quant_min: Smallest quantized value.
        quant_max: Largest quantized value.
        dtype: int8 or uint8.
        scale: One float of any float dtype, without a formula.
        zero_point: One number, or ``None``.
        formula: How each row's scale and zero point are chosen, a value of
            :class:`~qfuse.ir.quant.choose.Formula` except that of float8; ``""`` uses the static
            scale.
        eps: Minimum scale of the formula.
        scale_dtype: Dtype of dynamic scales.
        zero_point_dtype: Dtype of dynamic zero points.
        compute: Float dtype in which quantization computes.
        reciprocal: Multiply by the reciprocal, computed in the scale's dtype, instead of dividing.
        zero_point_first: Add the zero point before rounding instead of after.
        keep: Whether the float result is returned too.
        keep_sum: Whether ``x + residual`` is returned too.
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

    def named(self) -> dict[str, object]:
        """Return the arguments by their names in the schemas, in order."""
        return {
            "out_scale": self.scale,
            "out_zero_point": self.zero_point,
            "formula": self.formula,
            "choose_eps": self.eps,
            "scale_dtype": self.scale_dtype,
            "zero_point_dtype": self.zero_point_dtype,
            "quant_min": self.quant_min,
            "quant_max": self.quant_max,
            "out_dtype": self.dtype,
            "compute": self.compute,
            "reciprocal": self.reciprocal,
            "zero_point_first": self.zero_point_first,
            "keep": self.keep,
            "keep_sum": self.keep_sum,
        }

    def arguments(self) -> tuple[object, ...]:
        """Return the arguments in the order of the schemas."""
        return tuple(self.named().values())


def fake_rowwise(
    a: Any, rows: torch.Tensor, sum_dtype: torch.dtype, float_dtype: torch.dtype
) -> RowwiseResult:
    """Return the (fake) results of a rowwise op.

    Args:
        a: The op's arguments by name.
        rows: A tensor with the shape of the quantized result.
        sum_dtype: Dtype of the sum of input and residual.
        float_dtype: Dtype of the float result.
    """
    if float_dtype not in FLOATS:
        raise InputError(f"float_dtype must be a float, not {float_dtype}")
    if a.out_dtype not in BYTES:
        raise InputError(f"codes must be int8 or uint8, not {a.out_dtype}")
    # Static parameters are the caller's already.
    row = (*rows.shape[:-1], 1) if a.formula else (0,)
    return (
        rows.new_empty(rows.shape, dtype=a.out_dtype),
        rows.new_empty(row, dtype=a.scale_dtype),
        rows.new_empty(row, dtype=a.zero_point_dtype),
        rows.new_empty(rows.shape if a.keep else (0,), dtype=float_dtype),
        rows.new_empty(rows.shape if a.keep_sum else (0,), dtype=sum_dtype),
    )


def _fake_norm(a: Any) -> RowwiseResult:
    _check_source("x", a.x, a.x_scale, a.x_dtype)
    sum_dtype = a.x_dtype
    if a.residual is not None:
        _check_source("residual", a.residual, a.residual_scale, a.residual_dtype)
        # As torch adds them.
        sum_dtype = torch.promote_types(a.x_dtype, a.residual_dtype)
    return fake_rowwise(a, a.x, sum_dtype, a.float_dtype)


def _fake_activation(a: Any) -> RowwiseResult:
    _check_source("x", a.x, a.x_scale, a.x_dtype)
    return fake_rowwise(a, a.x, a.x_dtype, a.float_dtype)


def _check_source(
    what: str, x: torch.Tensor, scale: torch.Tensor | None, real: torch.dtype
) -> None:
    if x.dtype not in (*FLOATS, *BYTES) or real not in FLOATS:
        raise InputError(f"{what} must be floats or bytes, and not {x.dtype} for {real}")
    if (x.dtype in BYTES) != (scale is not None) or (x.dtype not in BYTES and x.dtype != real):
        raise InputError(f"{what} is {x.dtype}: bytes need a scale, and floats are of {real}")


def _complete_residual(values: dict[str, Any]) -> None:
    residual = values["residual"]
    if values["residual_dtype"] is None:
        # Without a residual it has no meaning, but the schema has no optional dtypes.
        values["residual_dtype"] = values["x_dtype"] if residual is None else residual.dtype


_X: dict[str, object] = {"x_scale": None, "x_zero_point": None}
_RESIDUAL: dict[str, object] = {
    "residual": None,
    "residual_scale": None,
    "residual_zero_point": None,
    "residual_dtype": None,
}


rms_norm_quantized: KernelOp[RowwiseResult] = KernelOp(
    "rms_norm_quantized",
    _fake_norm,
    defaults={**_X, **_RESIDUAL, "inner": torch.float32},
    like={"x_dtype": "x", "float_dtype": "x_dtype"},
    complete=_complete_residual,
    positional=("x", "weight", "eps", "output"),
)
"""RMS norm and quantization: ``(x, weight, eps, output, *, residual, inner, float_dtype)``."""

layer_norm_quantized: KernelOp[RowwiseResult] = KernelOp(
    "layer_norm_quantized",
    _fake_norm,
    defaults={**_X, **_RESIDUAL},
    like={"x_dtype": "x", "float_dtype": "x_dtype"},
    complete=_complete_residual,
    positional=("x", "weight", "bias", "eps", "output"),
)
"""Layer norm and quantization: ``(x, weight, bias, eps, output, *, residual, float_dtype)``."""

activation_quantized: KernelOp[RowwiseResult] = KernelOp(
    "activation_quantized",
    _fake_activation,
    defaults={**_X, "extras": ()},
    like={"x_dtype": "x", "float_dtype": "x_dtype"},
    positional=("x", "epilogue", "output", "extras"),
)
"""Epilogue ops and quantization: ``(x, epilogue, output, extras, *, float_dtype)``."""

ROWWISE_OPS = (rms_norm_quantized, layer_norm_quantized, activation_quantized)
