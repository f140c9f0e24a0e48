"""Int8 linears with weights per tensor or output channel, with their fakes.

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

``linear_w8a8_rows`` gives codes of the float result as :mod:`qfuse.kernels.rowwise` explains: with
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

Behind them:

====================  ===========================================================================
``real``              dtype of the linear's own result; float32 unless given
``out_dtype``         dtype behind the last step; ``real`` unless given. Of codes: int8 or uint8
``out_scale``         of ``linear_w8a8_quantized``: one float of any float dtype
``out_zero_point``    one number, or ``None``
``quant_min``         least code; ``quant_max`` is the greatest
``reciprocal``        multiply by the reciprocal (unless given); otherwise divide
``zero_point_first``  add the zero point before rounding instead of after
``output``            of ``linear_w8a8_rows``: a :class:`~qfuse.kernels.rowwise.RowwiseOutput`;
                      there is no sum to keep
``float_dtype``       dtype behind the last step; ``real`` unless given
====================  ===========================================================================

The quantized result is ``clamp(round(y * (1 / out_scale)) + out_zero_point, quant_min,
quant_max)``, rounding half to even. The reciprocal is taken in the dtype of ``out_scale`` and
rounded to float32, as ``torch.ops.quantized_decomposed`` does it with a float64 scale. NaN becomes
0. What may be left out, and only that, is given by name.

Scales may have any float dtype and are rounded to float32; zero points any integer dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from qfuse.kernels.fakes import check_packed, check_stored, halves_of
from qfuse.kernels.linear_ops import linear_ops


def _columns(a: Any) -> int:
    """Return the features of the result, or refuse operands that do not fit."""
    check_stored(a.x)
    n = a.w_sums.shape[0]
    return check_packed(a.x, a.w_packed, torch.int8, n, halves_of(a.epilogue))[0]


linear_w8a8, linear_w8a8_quantized, linear_w8a8_rows = linear_ops(
    "linear_w8a8", _columns, {"w_zero_point": None}
)
