"""Epilogue ops on images with a quantized result, and the fake of the op.

``image_activation_quantized(first, others, ...)`` joins images ``[N, C, *S]`` with two or three
spatial axes, which differ in their channels only, along their channels, and in the same pass over
memory:

0. dequantizes 8-bit values: ``(x - x_zero_point) * x_scale`` in float32;
1. applies the epilogue ops, each rounded as described in :mod:`qfuse.kernels.ops`;
2. quantizes with static parameters, as in :func:`qfuse.ir.quant.reference.quantize`, bit for bit.
   NaN becomes 0.

Images whose pixels have adjacent channels and a fixed distance are read in place, others are
copied. The result is channels-last. The op does not mutate its arguments; results do not depend on
the number of threads or on the instruction set.

====================  ==============================================================================
``first``             int8, uint8 or float32
``others``            images of the same dtype, or ``None``
``x_scale``           for 8-bit values: one float, or one per channel of the joined image
``x_zero_point``      ``None``, or numbers like ``x_scale``
``extras``            at most 4 tensors that broadcast to ``[N, C, *S]``: float32, bfloat16, float16
                      or quantized
``epilogue``          the ops, after which the dtype is float32; no GLU
``out_scale``         one float of any float dtype; ``out_zero_point``: one number, or ``None``
``quant_min``         smallest quantized value; ``quant_max`` is the largest
``reciprocal``        multiply by the reciprocal (the default) instead of dividing
``zero_point_first``  add the zero point before rounding instead of after
``out_dtype``         int8 or uint8
====================  ==============================================================================
"""

from __future__ import annotations

from typing import Any

import torch

from qfuse.ir.dtypes import BYTES
from qfuse.ir.errors import InputError
from qfuse.kernels.cat_ops import joined_result
from qfuse.kernels.op import KernelOp


def _result(a: Any) -> torch.Tensor:
    if a.out_dtype not in BYTES:
        raise InputError(f"codes must be int8 or uint8, not {a.out_dtype}")
    return joined_result([a.first, *(a.others or ())], (*BYTES, torch.float32), a.out_dtype)


image_activation_quantized: KernelOp[torch.Tensor] = KernelOp(
    "image_activation_quantized",
    _result,
    defaults={
        "others": None,
        "x_scale": None,
        "x_zero_point": None,
        "extras": None,
        "epilogue": "",
        "out_zero_point": None,
        "reciprocal": True,
        "zero_point_first": False,
    },
    positional=("first", "others"),
)
"""Epilogue ops and quantization: ``(first, others, *, epilogue, extras, out_scale, ...)``."""
