"""Int8 linears with per-tensor or per-channel weight scales, and their fakes.

``linear_w8a8``, ``linear_w8a8_quantized`` and ``linear_w8a8_rows`` compute on quantized values.
With ``x`` of shape ``[..., K]`` and the weight ``[N, K]``:

1. ``total = sum over k of (x - x_zero_point) * (w - w_zero_point)``, exact in int32 for K up to
   65536, or 32768 with a weight zero point; larger K raises.
2. ``y = float32(total) * x_scale * w_scale + bias``, from left to right in float32 without fused
   multiply-add, then rounded to ``product_dtype``, the linear's dtype in the source graph.
3. The epilogue ops in order. Each computes in float32 and rounds to the dtype that results from
   torch's type promotion, so a bfloat16 chain rounds where the same chain of torch ops does.
4. The dtype after the last op is ``out_dtype``; or the result is quantized to int8 or uint8.

The op ``glu(name,args,order)`` multiplies the activation of one half of the features, the gate, by
the other half; ``order`` is ``gate-first`` or ``up-first``. The activation and the product are each
rounded. It is short for ``halves(order)|act(name,args)|times()``: ops between ``halves`` and
``up()`` apply to the gate, ops between ``up()`` and ``times()`` to the other half (none without
``up()``). Earlier ops apply to all ``N`` features, later ops to the ``N / 2`` products, which are
the features of the result. The weight must then be packed by
:func:`qfuse.kernels.pack.pack_weight` with ``halves=True``.

A quantized extra is ``float32(q - zero_point) * scale``, rounded to float32, and counts as float32.

``prelu(i)`` multiplies values that are not positive by an extra, the slopes.

The op ``round(factor,zero,low,high,scale)`` quantizes and dequantizes:
``(clamp(round(y * factor) + zero, low, high) - zero) * scale``. NaN is quantized to 0.

``linear_w8a8_rows`` quantizes the float result as described in :mod:`qfuse.kernels.rowwise`, for
example with a dynamic scale per row. Its results are those of ``linear_w8a8`` followed by
``activation_quantized``, bit for bit, but the float result is only materialized in strips of
rows.

Results do not depend on the number of threads or on the instruction set: every path performs the
same operations in the same order. The ops do not mutate their arguments. The result is contiguous.

Arguments of every op:

=================  ==============================================================================
``x``              int8 or uint8, ``[..., K]``, at least one axis; any strides, including zero. Rows
                   at a fixed distance (such as slices) are read in place, others are copied.
``x_scale``        one float, or one per row of ``x`` in the order of its leading axes
``x_zero_point``   ``None``, one integer, or one per row; in the range of ``x``'s dtype
``w_packed``       from :func:`qfuse.kernels.pack.pack_weight`
``w_sums``         from the same call
``w_scale``        one float, or ``[N]``
``w_zero_point``   ``None``, one integer, or ``[N]``: the one that the sums were computed with
``bias``           ``None`` or float ``[N]``
``extras``         at most 4 tensors (float32, bfloat16, float16, or quantized: int8, uint8) that
                   broadcast to ``[..., N]``, or to the features of the ops that use them
``epilogue``       at most 8 ops in the canonical text: ``act(name,args)``, ``add(i,alpha)``,
                   ``mul(i)``, ``prelu(i)``, of a quantized extra
                   ``add(i,alpha,scale,zero_point)`` and ``mul(i,scale,zero_point)``,
                   ``cast(dtype)``, ``round``, one GLU, joined by ``|``. Activations: relu, gelu,
                   gelu_tanh, silu, sigmoid, tanh, hardtanh (low, high), hardswish, hardsigmoid,
                   leaky_relu (slope), elu (alpha, scale, input scale), mish, quick_gelu (factor in
                   the sigmoid), squared_relu
=================  ==============================================================================

Further arguments:

====================  ===========================================================================
``product_dtype``     dtype of the linear's own result; default float32
``out_dtype``         dtype after the last op; default ``product_dtype``; int8 or uint8 if quantized
``out_scale``         of ``linear_w8a8_quantized``: one float of any float dtype
``out_zero_point``    one number, or ``None``
``quant_min``         smallest quantized value; ``quant_max`` is the largest
``reciprocal``        multiply by the reciprocal (the default) instead of dividing
``zero_point_first``  add the zero point before rounding instead of after
``output``            of ``linear_w8a8_rows``: a :class:`~qfuse.kernels.rowwise.RowwiseOutput`;
                      ``keep_sum`` is not supported
``float_dtype``       dtype after the last op; default ``product_dtype``
====================  ===========================================================================

The quantized result is ``clamp(round(y * (1 / out_scale)) + out_zero_point, quant_min,
quant_max)``, rounding half to even. The reciprocal is computed in the dtype of ``out_scale`` and
rounded to float32, as in ``torch.ops.quantized_decomposed`` with a float64 scale. NaN becomes 0.
Optional arguments, and only those, are passed by name.

Scales may have any float dtype and are rounded to float32; zero points any integer dtype.
"""

from __future__ import annotations

from typing import Any

from qfuse.kernels.fakes import check_packed, check_stored, glu_factor
from qfuse.kernels.linear_ops import linear_ops


def _columns(a: Any) -> int:
    """Return the number of output features; check the operands."""
    check_stored(a.x)
    n = a.w_sums.shape[0]
    return check_packed(a.x, a.w_packed, 8, n, glu_factor(a.epilogue))[0]


linear_w8a8, linear_w8a8_quantized, linear_w8a8_rows = linear_ops(
    "linear_w8a8", _columns, {"w_zero_point": None}
)
