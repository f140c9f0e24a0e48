"""Rowwise ops, norms and activations that give codes, with their fakes.

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
   NaN becomes 0.

Sums are 64 float32 sums of every 64th element, added up in their order: neither the number of
threads nor the instruction set changes a bit. Nothing but the results is written to; they are
contiguous.

==============  ================================================================================
``x``           float32, bfloat16 or float16, one axis or more, any strides
``residual``    the same shape, any of these dtypes
``weight``      ``None``, or any float dtype: one number, or ``[K]``; likewise ``bias``
``extras``      at most 4 float tensors that broadcast to the shape of ``x``
``output``      a :class:`RowwiseOutput`
``inner``       dtype of the normalized row before the weight
``real``        dtype of the float result; that of ``x`` unless given
==============  ================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.fakes import REAL, STORED
from qfuse.kernels.op import KernelOp

RowwiseResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes, scale, zero point, the float result, the sum; what there is not is an empty tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowwiseOutput:
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

    def named(self) -> dict[str, object]:
        """Return them by the names of the schemas, in their order."""
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
        """Return them in the order of the schemas."""
        return tuple(self.named().values())


def fake_rowwise(
    a: Any, rows: torch.Tensor, residual: torch.Tensor | None, real: torch.dtype
) -> RowwiseResult:
    """Return the (fake) results of a rowwise op.

    Args:
        a: The op's arguments by name.
        rows: A tensor of the shape of the codes.
        residual: What is added to it.
        real: dtype of the float result.
    """
    if rows.dtype not in REAL or real not in REAL:
        raise InputError(f"x and real must be floats, not {rows.dtype} and {real}")
    if a.out_dtype not in STORED:
        raise InputError(f"codes must be int8 or uint8, not {a.out_dtype}")
    sum_dtype = rows.dtype
    if residual is not None:
        sum_dtype = torch.promote_types(rows.dtype, residual.dtype)
    row = (*rows.shape[:-1], 1) if a.formula else (0,)
    return (
        rows.new_empty(rows.shape, dtype=a.out_dtype),
        rows.new_empty(row, dtype=a.scale_dtype),
        rows.new_empty(row, dtype=a.zero_point_dtype),
        rows.new_empty(rows.shape if a.keep else (0,), dtype=real),
        rows.new_empty(rows.shape if a.keep_sum else (0,), dtype=sum_dtype),
    )


def _fake_norm(a: Any) -> RowwiseResult:
    return fake_rowwise(a, a.x, a.residual, a.real)


def _fake_activation(a: Any) -> RowwiseResult:
    return fake_rowwise(a, a.x, None, a.real)


rms_norm_quantized: KernelOp[RowwiseResult] = KernelOp(
    "rms_norm_quantized",
    _fake_norm,
    defaults={"residual": None, "inner": torch.float32},
    like={"real": "x"},
    positional=("x", "weight", "eps", "output"),
)
"""RMS norm and quantization: ``(x, weight, eps, output, *, residual, inner, real)``."""

layer_norm_quantized: KernelOp[RowwiseResult] = KernelOp(
    "layer_norm_quantized",
    _fake_norm,
    defaults={"residual": None},
    like={"real": "x"},
    positional=("x", "weight", "bias", "eps", "output"),
)
"""Layer norm and quantization: ``(x, weight, bias, eps, output, *, residual, real)``."""

activation_quantized: KernelOp[RowwiseResult] = KernelOp(
    "activation_quantized",
    _fake_activation,
    defaults={"extras": ()},
    like={"real": "x"},
    positional=("x", "epilogue", "output", "extras"),
)
"""Epilogue steps and quantization: ``(x, epilogue, output, extras, *, real)``."""

ROWWISE_OPS = (rms_norm_quantized, layer_norm_quantized, activation_quantized)
