"""Quantized images joined along their channels, and the fake of the op.

``cat_channels(first, others)`` is ``torch.cat([first, *others], 1)`` of int8 or uint8 images
``[N, C, *S]`` with two or three spatial axes, which differ in their channels only; the result is
channels-last. Images whose pixels have adjacent channels and a fixed distance, as those of a
channels-last image or of a split of one, are read in place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from qfuse.ir.dtypes import BYTES
from qfuse.ir.errors import InputError
from qfuse.ir.memory_formats import channels_last_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.sizes import same_shape
from qfuse.kernels.op import KernelOp


def joined_result(
    images: Sequence[torch.Tensor], dtypes: Collection[torch.dtype], dtype: torch.dtype
) -> torch.Tensor:
    """Return the (fake) result of an op that joins images along their channels; channels-last.

    Args:
        images: What it joins.
        dtypes: What it takes; all images have the same.
        dtype: Of the result.
    """
    first, *others = images
    last = channels_last_of(first.dim())
    if last is None or first.dtype not in dtypes:
        raise InputError(
            f"images must be {_names(dtypes)} with 4 or 5 axes, not {first.dtype} "
            f"{tuple(first.shape)}"
        )
    batch, _, *sizes = first.shape
    for image in others:
        fits = image.dtype == first.dtype and image.dim() == first.dim()
        if not fits or not same_shape((image.shape[0], *image.shape[2:]), (batch, *sizes)):
            raise InputError(
                f"images may differ in their channels only: {image.dtype} {tuple(image.shape)} "
                f"beside {first.dtype} {tuple(first.shape)}"
            )
    channels = sum(image.shape[1] for image in images)
    return torch.empty(
        (batch, channels, *sizes), dtype=dtype, device=first.device, memory_format=last
    )


def _names(dtypes: Collection[torch.dtype]) -> str:
    return " or ".join(map(dtype_name, dtypes))


def _result(a: Any) -> torch.Tensor:
    return joined_result([a.first, *(a.others or ())], BYTES, a.first.dtype)


cat_channels: KernelOp[torch.Tensor] = KernelOp("cat_channels", _result)
