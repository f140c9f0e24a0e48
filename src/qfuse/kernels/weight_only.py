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
``out_features``   ``N``; may be left out if the scales are ``[N]``
``bias``           ``None`` or float ``[N]``
``extras``         as in :mod:`qfuse.kernels.ops`, likewise ``epilogue``
``compute``        dtype that weights are dequantized in: float32 (unless given), bfloat16, float16
``out_dtype``      dtype behind the last step; that of ``x`` unless given
=================  ==============================================================================
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.fakes import (
    check_bias,
    check_packed,
    check_parameters,
    check_real,
    halves_of,
)
from qfuse.kernels.op import KernelOp
from qfuse.kernels.pack import BLOCK

GROUP_MULTIPLE = 8
"""Several groups, and groups with offsets, begin at multiples of this many input features."""


def _complete(a: dict[str, Any]) -> None:
    if a.get("out_features") is not None:
        return
    scale = a["w_scale"]
    if scale.dim() != 1:
        raise InputError(
            f"w_scale {tuple(scale.shape)} does not say how many output features there are",
            fix="give out_features",
        )
    a["out_features"] = scale.shape[0]


def _fake(stored: torch.dtype, a: Any) -> torch.Tensor:
    check_real(a.x, compute=a.compute, out_dtype=a.out_dtype)
    if halves_of(a.epilogue) != 1:
        raise InputError(f"this kernel multiplies no halves: {a.epilogue!r}")
    n, blocks = check_packed(a.x, a.w_packed, stored, a.out_features)
    groups = a.w_scale.shape[1] if a.w_scale.dim() == 3 else 1  # noqa: PLR2004
    _check_groups(a.x.shape[-1], groups, whole=groups == 1 and a.w_offset is None)
    shapes = [(blocks, groups, BLOCK), *([(n,)] if groups == 1 else [])]
    check_parameters("w_scale", a.w_scale, None, *shapes)
    if a.w_zero_point is not None:
        check_parameters("w_zero_point", a.w_zero_point, (stored,), *shapes)
    if a.w_offset is not None:
        check_parameters("w_offset", a.w_offset, None, *shapes)
    check_bias(a.bias, n)
    result: torch.Tensor = a.x.new_empty((*a.x.shape[:-1], n), dtype=a.out_dtype)
    return result


def _check_groups(k: int, groups: int, *, whole: bool) -> None:
    if whole:
        return
    if groups < 1 or k % groups or k // groups % GROUP_MULTIPLE:
        raise InputError(
            f"groups, and weights with offsets, must be of a multiple of {GROUP_MULTIPLE} input "
            f"features; here {groups} groups share {k}"
        )


def _weight_only(name: str, stored: torch.dtype) -> KernelOp[torch.Tensor]:
    defaults = {
        "w_zero_point": None,
        "w_offset": None,
        "bias": None,
        "extras": (),
        "epilogue": "",
        "compute": torch.float32,
    }
    fake = partial(_fake, stored)
    return KernelOp(name, fake, defaults=defaults, like={"out_dtype": "x"}, complete=_complete)


linear_w4a16 = _weight_only("linear_w4a16", torch.uint8)
linear_w8a16 = _weight_only("linear_w8a16", torch.int8)
