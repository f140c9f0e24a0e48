"""Weight-only linears: float activations with packed quantized weights, and their fakes.

``linear_w4a16`` takes 4-bit values, 0 to 15, from :func:`qfuse.kernels.pack4.pack_weight4`;
``linear_w8a16`` takes int8 from :func:`qfuse.kernels.pack.pack_weight`, or float8 in the same
layout; ``linear_w16a32`` takes float16, for float32 activations. With ``x`` of shape ``[..., K]``
and a weight of ``N`` output features, whose input features are split into groups of equal size with
separate parameters:

1. ``w = (code - zero_point) * scale + offset``, rounded to ``compute`` after the product and after
   the sum, and then to the dtype of ``x``, as by a dequantize in the source graph.
2. ``y = sum over k of x * w + bias``, summed in float32, then rounded to the dtype of ``x``.
   float32 is multiplied in float32, bfloat16 in bfloat16 if the processor supports it, else in
   float32; float16 in float32.
3. The epilogue ops in order, as described in :mod:`qfuse.kernels.ops`.

In two cases scales multiply sums instead of weights, which are then integers and exact in every
dtype. Weights are not rounded there, so the result is closer to the exact one.

- One group without offsets, for any number of rows: ``y = (sum of x * (code - zero_point)) * scale
  + bias``.
- At most four rows: the sum over groups, in their order, of ``(sum of x * (code - zero_point)) *
  scale + (sum of x) * offset``.

Results do not depend on the number of threads. The summation order, and with it the last bits,
depends on the instruction set, on whether there are at most four rows, and in bfloat16 with native
instructions on whether there are at most two: sums then have two parts (four bits), or are computed
in float32 (eight bits), where converting to bfloat16 costs more than it saves. The same conditions
decide whether bfloat16 below 2**-126 is flushed to zero, as those instructions do. With
AVX512-VNNI, up to four rows times int8 with one scale per feature are multiplied as integers where
the values of the row allow it, and rounded once; whether they do depends on the row, and on whether
there are more than two. One row times 4-bit values without offsets is multiplied alike in groups of
16 and more; the sum of each group is rounded there, or of 256 input features of a longer one.
The ops do not mutate their arguments. The result is contiguous.

=================  ==============================================================================
``x``              float32, bfloat16 or float16, ``[..., K]``, at least one axis; any strides, also
                   zero. Rows at a fixed distance are read in place, others are copied.
``w_packed``       the packed weight: uint8 of 4 bits; int8 or float8 of 8 bits; float16
``w_scale``        any float dtype, used as float32: ``[N]``, or groupwise ``[ceil(N / 64), groups,
                   64]`` from :func:`qfuse.kernels.pack_groups.pack_groups`. More than one group,
                   and offsets, need groups of a multiple of 8 input features.
``w_zero_point``   ``None``, or of the same shape: uint8 0 to 15 (``None`` means 8) for
                   ``linear_w4a16``, where higher bits are ignored; int8 (``None`` means 0) for
                   ``linear_w8a16``; floats have none
``w_offset``       ``None``, or float of the same shape
``out_features``   ``N``; optional if the scales are ``[N]``
``bias``           ``None`` or float ``[N]``
``extras``         as in :mod:`qfuse.kernels.ops`, likewise ``epilogue``
``compute``        dtype that weights are dequantized in: float32 (default), bfloat16, float16
``out_dtype``      dtype after the last op; default that of ``x``
=================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.fakes import (
    PACKED_DTYPES,
    check_bias_size,
    check_floats,
    check_packed,
    check_parameters,
    glu_factor,
)
from qfuse.kernels.op import KernelOp
from qfuse.kernels.pack import BLOCK

GROUP_MULTIPLE = 8
"""Group sizes are multiples of this, if there are several groups or offsets."""


def _complete_features(name: str, a: dict[str, Any]) -> None:
    """Fill in the number of output features, the argument ``name``, from the scales.

    Raises:
        InputError: The scales are not one per output feature.
    """
    if a.get(name) is not None:
        return
    scale = a["w_scale"]
    # Packed scales are padded to whole blocks.
    if scale.dim() != 1:
        raise InputError(
            f"w_scale {tuple(scale.shape)} does not say how many output features there are",
            fix=f"give {name}",
        )
    a[name] = scale.shape[0]


def _fake(bits: int, a: Any) -> torch.Tensor:
    check_floats(a.x, compute=a.compute, out_dtype=a.out_dtype)
    check_float_weight(a)
    if glu_factor(a.epilogue) != 1:
        raise InputError(f"this kernel does not support GLU: {a.epilogue!r}")
    n, blocks = check_packed(a.x, a.w_packed, bits, a.out_features, floats=True)
    groups = a.w_scale.shape[1] if a.w_scale.dim() == 3 else 1  # noqa: PLR2004
    # A single group with offsets is processed like several: offsets multiply the sum of its inputs.
    _check_groups(a.x.shape[-1], groups, whole=groups == 1 and a.w_offset is None)
    shapes = [(blocks, groups, BLOCK), *([(n,)] if groups == 1 else [])]
    check_parameters("w_scale", a.w_scale, None, *shapes)
    if a.w_zero_point is not None:
        check_parameters("w_zero_point", a.w_zero_point, PACKED_DTYPES[bits][:1], *shapes)
    if a.w_offset is not None:
        check_parameters("w_offset", a.w_offset, None, *shapes)
    check_bias_size(a.bias, n)
    result: torch.Tensor = a.x.new_empty((*a.x.shape[:-1], n), dtype=a.out_dtype)
    return result


def check_float_weight(a: Any) -> None:
    """Check what does not go together with a packed weight of floats.

    Raises:
        InputError: It has zero points or offsets, or is float16 and activations are not float32.
    """
    if not a.w_packed.dtype.is_floating_point:
        return
    if a.w_zero_point is not None or getattr(a, "w_offset", None) is not None:
        raise InputError(f"{a.w_packed.dtype} weights have neither zero points nor offsets")
    if a.w_packed.dtype is torch.float16 and a.x.dtype is not torch.float32:
        raise InputError(f"float16 weights multiply float32 activations, not {a.x.dtype}")


def _check_groups(k: int, groups: int, *, whole: bool) -> None:
    if whole:
        return
    if groups < 1 or k % groups or k // groups % GROUP_MULTIPLE:
        raise InputError(
            f"groups, and weights with offsets, must be of a multiple of {GROUP_MULTIPLE} input "
            f"features; here {groups} groups share {k}"
        )


def weight_only_op(
    name: str, fake: Callable[[Any], torch.Tensor], features: str, **defaults: object
) -> KernelOp[torch.Tensor]:
    """Return a weight-only op whose argument ``features`` is the number of output features."""
    known = {
        "w_zero_point": None,
        "bias": None,
        "extras": (),
        "epilogue": "",
        "compute": torch.float32,
        **defaults,
    }
    complete = partial(_complete_features, features)
    return KernelOp(name, fake, defaults=known, like={"out_dtype": "x"}, complete=complete)


def _linear(name: str, bits: int) -> KernelOp[torch.Tensor]:
    return weight_only_op(name, partial(_fake, bits), "out_features", w_offset=None)


linear_w4a16 = _linear("linear_w4a16", 4)
linear_w8a16 = _linear("linear_w8a16", 8)
linear_w16a32 = _linear("linear_w16a32", 16)
