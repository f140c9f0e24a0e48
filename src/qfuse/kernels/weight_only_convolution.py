"""Weight-only convolutions: float activations with packed quantized weights, and their fakes.

``convolution_w8a16`` takes int8 and ``convolution_w4a16`` 4-bit values, 0 to 15, from
:func:`~qfuse.kernels.pack_convolution.pack_values` or, transposed,
:func:`~qfuse.kernels.pack_convolution.pack_transposed_values`. They compute what
``torch.nn.functional.conv1d`` to ``conv3d`` compute, with one pair of parameters per output
channel, or per output channel and group of adjacent input channels:

1. ``w = (code - zero_point) * scale``. In groups, it is rounded to ``compute`` and then to the
   dtype of ``x``. Otherwise the scale multiplies the sum, so that weights are integers and exact.
2. ``y = sum of x * w + bias``, summed in float32, then rounded to the dtype of ``x``. The padding
   is with zeros. float32 is multiplied in float32, bfloat16 in bfloat16 if the processor supports
   it and the convolution is not depthwise, else in float32; float16 in float32.
3. The epilogue ops in order, as described in :mod:`qfuse.kernels.ops`, without GLU.

Results do not depend on the number of threads or on the memory format of ``x``. The summation
order, and with it the last bits, depends on the instruction set. The ops do not mutate their
arguments. Shape and memory format of the result are those of torch: channels last if ``x`` suggests
it, else contiguous.

=================  ==============================================================================
``x``              float32, bfloat16 or float16, ``[N, C, *S]`` or ``[C, *S]`` with 1 to 3 spatial
                   axes; any strides. Pixels with adjacent channels (channels last) are read in
                   place.
``w_packed``       the packed weight
``w_scale``        any float dtype, used as float32: one per output channel; or, groupwise,
                   ``[ceil(N / 64), groups, 64]`` from
                   :func:`~qfuse.kernels.pack_groups.pack_groups`, in the order of the packed
                   weight: phase, tap, then channel. Groups are of a multiple of 8 input channels
                   that divides those of a group of channels.
``w_zero_point``   ``None``, or of the same shape: uint8 0 to 15 (``None`` means 8) for
                   ``convolution_w4a16``; int8 (``None`` means 0) for ``convolution_w8a16``
``out_channels``   of the result; optional if the scales are one per output channel
``bias``           ``None`` or float, one per output channel
``kernel``         sizes of the kernel, one per spatial axis; so are ``stride``, ``padding``,
                   ``dilation`` and ``output_padding``. Not transposed, ``padding`` may have twice
                   as many numbers: those before every axis, then those after
``transposed``     whether it is a transposed convolution
``groups``         of channels
``extras``         at most 4 tensors, as in :mod:`qfuse.kernels.ops`, that broadcast to the result
``epilogue``       as in :mod:`qfuse.kernels.ops`
``compute``        dtype that weights are dequantized in: float32 (default), bfloat16, float16
``out_dtype``      dtype after the last op; default that of ``x``
=================  ==============================================================================
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch

from qfuse.ir.errors import InputError
from qfuse.kernels._torch_api import memory_format_of
from qfuse.kernels.convolution_ops import check_settings, output_size, transposed_size
from qfuse.kernels.fakes import (
    PACKED_DTYPES,
    check_bias_size,
    check_floats,
    check_parameters,
    packed_words,
)
from qfuse.kernels.op import KernelOp
from qfuse.kernels.pack import BLOCK, GROUP
from qfuse.kernels.pack_convolution import taps_of_phases
from qfuse.kernels.weight_only import GROUP_MULTIPLE, check_float_weight, weight_only_op


def _fake(bits: int, a: Any) -> torch.Tensor:
    check_floats(a.x, compute=a.compute, out_dtype=a.out_dtype)
    check_float_weight(a)
    axes, n = len(a.kernel), a.out_channels
    check_settings(a, "output_padding")
    if a.x.dim() not in {axes + 1, axes + 2}:
        raise InputError(f"x must have {axes + 1} or {axes + 2} axes, not {a.x.dim()}")
    if a.groups < 1:
        raise InputError(f"groups must be positive, not {a.groups}")
    *batch, channels = a.x.shape[:-axes]
    if n < 0 or channels % a.groups or n % a.groups:
        raise InputError(f"{channels} channels and n={n} cannot be split into {a.groups} groups")
    _check_weight(a, bits, channels // a.groups)
    check_bias_size(a.bias, n)
    size = a.x.shape[-axes:]
    if a.transposed:
        out = transposed_size(a, size)
    else:
        out = output_size(size, a.kernel, a.stride, a.padding, a.dilation)
    kept = memory_format_of(a.x) if a.x.dim() == axes + 2 else torch.contiguous_format
    return torch.empty([*batch, n, *out], dtype=a.out_dtype, device=a.x.device, memory_format=kept)


def _check_weight(a: Any, bits: int, channels: int) -> None:
    """Check the packed weight and its parameters; ``channels`` are those of a group."""
    phases = [prod(a.kernel)]
    if a.transposed:
        taps = taps_of_phases(a.kernel, a.stride, a.dilation)
        phases = [prod(map(len, phase)) for phase in taps]
    words = sum(packed_words(count * channels, bits) for count in phases)
    n, k = a.out_channels, sum(phases) * channels
    expected = ((n + BLOCK - 1) // BLOCK, words, BLOCK, GROUP)
    if a.w_packed.dtype not in PACKED_DTYPES[bits] or a.w_packed.shape != expected:
        raise InputError(f"w_packed {tuple(a.w_packed.shape)} does not fit, expected {expected}")
    groups = a.w_scale.shape[1] if a.w_scale.dim() == 3 else 1  # noqa: PLR2004
    if groups != 1:
        _check_groups(k, groups, channels)
    shapes = [(expected[0], groups, BLOCK), *([(n,)] if groups == 1 else [])]
    check_parameters("w_scale", a.w_scale, None, *shapes)
    if a.w_zero_point is not None:
        check_parameters("w_zero_point", a.w_zero_point, PACKED_DTYPES[bits][:1], *shapes)


def _check_groups(k: int, groups: int, channels: int) -> None:
    size = k // groups if groups else 0
    if not size or k % groups or size % GROUP_MULTIPLE or channels % size:
        raise InputError(
            f"groups must be of a multiple of {GROUP_MULTIPLE} input channels that divides "
            f"{channels}; here {groups} groups share {k} weights"
        )


def _convolution(name: str, bits: int) -> KernelOp[torch.Tensor]:
    fake = partial(_fake, bits)
    return weight_only_op(name, fake, "out_channels", transposed=False, groups=1)


convolution_w4a16 = _convolution("convolution_w4a16", 4)
convolution_w8a16 = _convolution("convolution_w8a16", 8)
