"""The kernels as Python functions, and their fake versions for tracing.

``linear_w8a8``, ``linear_w8a8_quantized`` and ``linear_w8a8_rows`` compute on stored numbers. With
``x`` of shape ``[..., K]`` and the weight ``[N, K]``:

1. ``total = sum over k of (x - x_zero_point) * (w - w_zero_point)``, exact in int32. That holds for
   K up to 65536, and up to 32768 with a weight zero point; larger K raises.
2. ``y = float32(total) * x_scale * w_scale + bias``, from left to right in float32 without fused
   multiply-add, then rounded to ``real``: the dtype that the linear has in the source graph.
3. The epilogue's steps in order. Each computes in float32 and rounds to the dtype that torch's type
   promotion gives it, so a bfloat16 chain rounds where the same chain of torch ops does.
4. The dtype behind the last step is ``out_dtype``; or the result is quantized to int8 or uint8.

A step ``glu(name,args,order)`` multiplies the activation of one half of the features, the gate, by
the other half; ``order`` is ``gate-first`` or ``up-first``. The activation and the product are
rounded each. It is short for ``halves(order)|act(name,args)|times()``: what stands between
``halves`` and ``up()`` is done on the gate, what stands between ``up()`` and ``times()`` on the
other half; without ``up()`` that is nothing. Steps in front work on all ``N`` features, steps
behind on the ``N / 2`` products, which the result is made of. The weight is packed by
:func:`qfuse.kernels.pack.pack_weight` with ``halves=True`` then.

A step ``round(factor,zero,low,high,scale)`` is a trip to stored numbers and back:
``(clamp(round(y * factor) + zero, low, high) - zero) * scale``. NaN goes by the code 0.

``linear_w8a8_rows`` gives codes of the float result as :mod:`qfuse.kernels.row_ops` explains: with
a scale that is chosen for each row, for one. Its results are those of ``linear_w8a8`` with
``activation_quantized`` behind it, bit for bit, but only some rows of the float result exist at a
time.

No value depends on the number of threads, nor on the instruction set: every path does the same
operations in the same order. Nothing but the result is written to. The result is contiguous.

Shapes and dtypes that every op takes:

=================  ==============================================================================
``x``              int8 or uint8, ``[..., K]``, one axis or more; any strides, zero included. Rows
                   at a fixed distance (slices, say) are read in place, others are copied.
``x_scale``        one float, or one per row of ``x`` in the order of its leading axes
``x_zero_point``   ``None``, one integer, or one per row; in the range of ``x``'s dtype
``w_packed``       from :func:`qfuse.kernels.pack.pack_weight`
``w_sums``         from the same call
``w_scale``        one float, or ``[N]``
``w_zero_point``   ``None``, one integer, or ``[N]``: what the sums were made with
``bias``           ``None`` or float ``[N]``
``extras``         at most 4 float tensors (float32, bfloat16, float16) that broadcast to
                   ``[..., N]``, or to the features of the steps that read them
``epilogue``       at most 8 steps in the canonical text: ``act(name,args)``, ``add(i,alpha)``,
                   ``mul(i)``, ``cast(dtype)``, ``round``, one product of halves,
                   joined by ``|``. Activations: relu, gelu, gelu_tanh, silu, sigmoid, tanh,
                   hardtanh (low, high), hardswish, hardsigmoid, leaky_relu (slope)
=================  ==============================================================================

Scales may have any float dtype and are rounded to float32; zero points any integer dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.fakes import REAL, STORED, check_packed, check_stored, halves_of
from qfuse.kernels.row_ops import RowOutput, RowResult, fake_row_results


def linear_w8a8(  # noqa: PLR0913 - the schema's arguments
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero_point: torch.Tensor | None,
    w_packed: torch.Tensor,
    w_sums: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    w_zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
    epilogue: str = "",
    real: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """int8 linear with a float result; arguments as the module explains them.

    Args:
        x: Stored activation.
        x_scale: Its scale.
        x_zero_point: Its zero point.
        w_packed: Packed weight.
        w_sums: Sums of the weight.
        w_scale: Its scale.
        w_zero_point: Its zero point.
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
    result: torch.Tensor = torch.ops.qfuse.linear_w8a8.default(
        x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, bias, list(extras),
        epilogue, real, out_dtype or real,
    )  # fmt: skip
    return result


def linear_w8a8_quantized(  # noqa: PLR0913 - the schema's arguments
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero_point: torch.Tensor | None,
    w_packed: torch.Tensor,
    w_sums: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    out_scale: torch.Tensor,
    out_zero_point: torch.Tensor | None,
    quant_min: int,
    quant_max: int,
    out_dtype: torch.dtype,
    reciprocal: bool = True,
    zero_point_first: bool = False,
    w_zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
    epilogue: str = "",
    real: torch.dtype = torch.float32,
) -> torch.Tensor:
    """int8 linear whose result is quantized per tensor, in float32.

    ``clamp(round(y * (1 / out_scale)) + out_zero_point, quant_min, quant_max)``, rounding half to
    even. The reciprocal is taken in the dtype of ``out_scale`` and rounded to float32, as
    ``torch.ops.quantized_decomposed`` does it with a float64 scale. NaN becomes 0.

    Args:
        x: Stored activation.
        x_scale: Its scale.
        x_zero_point: Its zero point.
        w_packed: Packed weight.
        w_sums: Sums of the weight.
        w_scale: Its scale.
        out_scale: One float of any float dtype.
        out_zero_point: One number, or ``None``.
        quant_min: Least code.
        quant_max: Greatest code.
        out_dtype: int8 or uint8.
        reciprocal: Multiply by the reciprocal; otherwise divide.
        zero_point_first: Add the zero point before rounding instead of after.
        w_zero_point: Zero point of the weight.
        bias: Added before the epilogue.
        extras: Tensors that the epilogue names by index.
        epilogue: Canonical text of the steps.
        real: dtype of the linear's own result.

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        RuntimeError: An argument does not fit; the message names it. While tracing, what can be
            seen of that is an InputError.
    """
    result: torch.Tensor = torch.ops.qfuse.linear_w8a8_quantized.default(
        x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, bias, list(extras),
        epilogue, real, out_scale, out_zero_point, quant_min, quant_max, reciprocal,
        zero_point_first, out_dtype,
    )  # fmt: skip
    return result


def linear_w8a8_rows(  # noqa: PLR0913 - the schema's arguments
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero_point: torch.Tensor | None,
    w_packed: torch.Tensor,
    w_sums: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    output: RowOutput,
    w_zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
    epilogue: str = "",
    real: torch.dtype = torch.float32,
    float_dtype: torch.dtype | None = None,
) -> RowResult:
    """int8 linear whose rows become codes with scales of their own.

    Args:
        x: Stored activation.
        x_scale: Its scale.
        x_zero_point: Its zero point.
        w_packed: Packed weight.
        w_sums: Sums of the weight.
        w_scale: Its scale.
        output: How rows become codes; there is no sum to keep.
        w_zero_point: Zero point of the weight.
        bias: Added before the epilogue.
        extras: Tensors that the epilogue names by index.
        epilogue: Canonical text of the steps.
        real: dtype of the linear's own result.
        float_dtype: dtype behind the last step; ``None`` is ``real``.

    Returns:
        As of :func:`qfuse.kernels.row_ops.activation_quantized`.

    Raises:
        RuntimeError: An argument does not fit; the message names it. While tracing, what can be
            seen of that is an InputError.
    """
    result: RowResult = torch.ops.qfuse.linear_w8a8_rows.default(
        x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, bias, list(extras),
        epilogue, real, float_dtype or real, *output.arguments(),
    )  # fmt: skip
    return result


def register_fakes() -> None:
    """Tell torch the shapes and dtypes of the results; the library must have been loaded."""
    torch.library.register_fake("qfuse::linear_w8a8", _fake_linear_w8a8)
    torch.library.register_fake("qfuse::linear_w8a8_quantized", _fake_linear_w8a8_quantized)
    torch.library.register_fake("qfuse::linear_w8a8_rows", _fake_linear_w8a8_rows)


def _fake_linear_w8a8(  # noqa: PLR0913, PLR0917 - the schema's arguments
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero_point: torch.Tensor | None,
    w_packed: torch.Tensor,
    w_sums: torch.Tensor,
    w_scale: torch.Tensor,
    w_zero_point: torch.Tensor | None,
    bias: torch.Tensor | None,
    extras: Sequence[torch.Tensor] | None,
    epilogue: str,
    real: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    del x_scale, x_zero_point, w_scale, w_zero_point, bias, extras
    check_stored(x)
    if real not in REAL or out_dtype not in REAL:
        raise InputError(f"real and out_dtype must be floats, not {real} and {out_dtype}")
    return _fake_result(x, w_packed, w_sums.shape[0], out_dtype, epilogue)


def _fake_linear_w8a8_quantized(  # noqa: PLR0913, PLR0917 - the schema's arguments
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero_point: torch.Tensor | None,
    w_packed: torch.Tensor,
    w_sums: torch.Tensor,
    w_scale: torch.Tensor,
    w_zero_point: torch.Tensor | None,
    bias: torch.Tensor | None,
    extras: Sequence[torch.Tensor] | None,
    epilogue: str,
    real: torch.dtype,
    out_scale: torch.Tensor,
    out_zero_point: torch.Tensor | None,
    quant_min: int,
    quant_max: int,
    reciprocal: bool,
    zero_point_first: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    del x_scale, x_zero_point, w_scale, w_zero_point, bias, extras, real
    del out_scale, out_zero_point, quant_min, quant_max, reciprocal, zero_point_first
    check_stored(x)
    if out_dtype not in STORED:
        raise InputError(f"codes must be int8 or uint8, not {out_dtype}")
    return _fake_result(x, w_packed, w_sums.shape[0], out_dtype, epilogue)


def _fake_linear_w8a8_rows(  # noqa: PLR0913, PLR0917 - the schema's arguments
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero_point: torch.Tensor | None,
    w_packed: torch.Tensor,
    w_sums: torch.Tensor,
    w_scale: torch.Tensor,
    w_zero_point: torch.Tensor | None,
    bias: torch.Tensor | None,
    extras: Sequence[torch.Tensor] | None,
    epilogue: str,
    real: torch.dtype,
    float_dtype: torch.dtype,
    *output: object,
) -> RowResult:
    rows = _fake_linear_w8a8(
        x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, bias, extras, epilogue,
        real, float_dtype,
    )  # fmt: skip
    return fake_row_results(rows, None, float_dtype, output)


def _fake_result(
    x: torch.Tensor, w_packed: torch.Tensor, n: int, dtype: torch.dtype, epilogue: str
) -> torch.Tensor:
    columns, _ = check_packed(x, w_packed, torch.int8, n, halves_of(epilogue))
    return x.new_empty((*x.shape[:-1], columns), dtype=dtype)
