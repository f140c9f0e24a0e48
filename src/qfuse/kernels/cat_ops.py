"""Quantized images joined along their channels, and the fake of the op.

``cat_channels(first, others)`` is ``torch.cat([first, *others], 1)`` of int8 or uint8 images
``[N, C, *S]`` with two or three spatial axes, which differ in their channels only; the result is
channels-last. Images whose pixels have adjacent channels and a fixed distance, as those of a
channels-last image or of a split of one, are read in place.
"""

from __future__ import annotations

from typing import Any

import torch

from qfuse.ir.dtypes import BYTES
from qfuse.ir.errors import InputError
from qfuse.ir.memory_formats import channels_last_of
from qfuse.ir.sizes import same_shape
from qfuse.kernels.op import KernelOp


def _result(a: Any) -> torch.Tensor:
    first, others = a.first, a.others or ()
    last = channels_last_of(first.dim())
    if last is None or first.dtype not in BYTES:
        raise InputError(
            f"images must be int8 or uint8 with 4 or 5 axes, not {first.dtype} {tuple(first.shape)}"
        )
    batch, _, *sizes = first.shape
    for image in others:
        fits = image.dtype == first.dtype and image.dim() == first.dim()
        if not fits or not same_shape((image.shape[0], *image.shape[2:]), (batch, *sizes)):
            raise InputError(
                f"images may differ in their channels only: {image.dtype} {tuple(image.shape)} "
                f"beside {first.dtype} {tuple(first.shape)}"
            )
    channels = sum(image.shape[1] for image in (first, *others))
    return torch.empty(
        (batch, channels, *sizes), dtype=first.dtype, device=first.device, memory_format=last
    )


cat_channels: KernelOp[torch.Tensor] = KernelOp("cat_channels", _result)
