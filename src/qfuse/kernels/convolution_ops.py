"""Int8 convolutions in one, two or three dimensions, and their fakes.

``convolution_w8a8`` and ``convolution_w8a8_quantized`` compute on quantized values what
``torch.nn.functional.conv1d`` to ``conv3d`` compute on floats:

1. ``total``: the convolution of ``x - x_zero_point`` and ``w - w_zero_point``, exact in int32 for
   ``K = taps * channels of a group`` up to 65536, or 32768 with a weight zero point; larger K
   raises. Padding is with the zero point, which stands for 0.
2. ``y = float32(total) * x_scale * w_scale + bias``, then the epilogue ops, then the result, all as
   in :mod:`qfuse.kernels.ops`. The epilogue has no GLU.

The shape of the result and its memory format are those of torch: channels last if ``x`` suggests
it, else contiguous. Results do not depend on the memory format of ``x``, on the number of threads
or on the instruction set. The ops do not mutate their arguments.

==================  ==============================================================================
``x``               int8 or uint8, ``[N, C, *S]`` or ``[C, *S]`` with 1 to 3 spatial axes; any
                    strides. Pixels with adjacent channels (channels last) are read in place.
``x_scale``         one float
``x_zero_point``    ``None`` or one integer, in the range of ``x``'s dtype
``w_packed``        from :func:`~qfuse.kernels.pack_convolution.pack_convolution`; transposed from
                    :func:`~qfuse.kernels.pack_convolution.pack_transposed`
``w_sums``          from :func:`~qfuse.kernels.pack_convolution.convolution_sums`; transposed from
                    :func:`~qfuse.kernels.pack_convolution.transposed_sums`
``w_scale``         one float, or one per output channel
``w_zero_point``    ``None``, one integer, or one per output channel
``bias``            ``None`` or one float per output channel
``kernel``          sizes of the kernel, one per spatial axis; so are ``stride``, ``padding``,
                    ``dilation`` and ``output_padding``. Not transposed, ``padding`` may have twice
                    as many numbers: those before every axis, then those after
``transposed``      whether it is a transposed convolution
``groups``          of channels
``extras``          at most 4 tensors, as in :mod:`qfuse.kernels.ops`, that broadcast to the result
==================  ==============================================================================

``convolution_depthwise_w8a8`` and ``convolution_depthwise_w8a8_quantized`` are for ordinary
convolutions with one group for each channel of ``x``, and any number of output channels for each.
They take neither ``output_padding`` nor ``transposed`` nor ``groups``, and a weight from
:func:`~qfuse.kernels.pack_convolution.pack_depthwise`.

``convolution_w8a8_grouped`` and ``convolution_w8a8_grouped_quantized`` have scales per group of
input channels. The total of each group is converted to float32, multiplied by the group's scale,
and added in the order tap, then group. They take ``out_channels`` instead of ``w_zero_point``;
``w_scale`` is float32 ``[groups, ceil(N / groups / 64), scales, 64]`` from
:func:`~qfuse.kernels.pack_convolution_groups.pack_channel_groups`, and ``w_sums`` from
:func:`~qfuse.kernels.pack_convolution_groups.group_sums` or ``transposed_group_sums``. Groups are
of a multiple of 4 channels that divides those of a group of the convolution.

``epilogue``, ``product_dtype``, ``out_dtype`` and the arguments of a quantized result are those of
:mod:`qfuse.kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import torch

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.errors import InputError
from qfuse.kernels._torch_api import memory_format_of
from qfuse.kernels.fakes import check_parameters, check_stored
from qfuse.kernels.op import KernelOp
from qfuse.kernels.pack import BLOCK, GROUP
from qfuse.kernels.pack_convolution import depthwise_groups, taps_of_phases

_GROUPED: Mapping[str, object] = {
    "bias": None,
    "extras": (),
    "epilogue": "",
    "product_dtype": torch.float32,
}
_DEFAULTS: Mapping[str, object] = {"w_zero_point": None, **_GROUPED}
_WINDOW: Mapping[str, object] = {"transposed": False, "groups": 1}
_OUTPUT: Mapping[str, object] = {"reciprocal": True, "zero_point_first": False}


def output_size(
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return the spatial sizes of the result of an ordinary convolution.

    There is one padding per axis, or one before every axis, then one after.

    Raises:
        InputError: The kernel is larger than the padded input.
    """
    count = len(kernel)
    # The last `count` numbers are those after.
    both = [padding[i] + padding[i - count] for i in range(count)]
    axes = zip(size, kernel, stride, both, dilation, strict=True)
    rooms = [(n + p - d * (k - 1) - 1, s) for n, k, s, p, d in axes]
    # A dynamic size is checked when the op runs: comparing it here would add a guard.
    if any(type(room) is int and room < 0 for room, _ in rooms):
        raise InputError(f"the kernel {list(kernel)} is larger than the padded input {list(size)}")
    return [room // s + 1 for room, s in rooms]


def transposed_size(a: Any, size: Sequence[int]) -> list[int]:
    """Return the spatial sizes of the result of a transposed convolution."""
    axes = zip(size, a.kernel, a.stride, a.padding, a.dilation, a.output_padding, strict=True)
    return [(n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, d, more in axes]


def _depth(a: Any, channels: int) -> int:
    """Return the groups of four ``k`` of a packed weight."""
    # Each phase of a transposed convolution has its own taps, padded to whole groups.
    taps = [prod(a.kernel)]
    if a.transposed:
        phases = taps_of_phases(a.kernel, a.stride, a.dilation)
        taps = [prod(map(len, phase)) for phase in phases]
    return sum(-(-count * channels // GROUP) for count in taps)


def _check_window(a: Any, *more: str) -> None:
    check_stored(a.x)
    axes = len(a.kernel)
    check_settings(a, *more)
    if a.x.dim() not in {axes + 1, axes + 2}:
        raise InputError(f"x must have {axes + 1} or {axes + 2} axes, not {a.x.dim()}")


def check_settings(a: Any, *more: str) -> None:
    """Check how many numbers the settings have, and those named besides."""
    axes = len(a.kernel)
    for name in ("stride", "padding", "dilation", *more):
        count = len(getattr(a, name))
        uneven = name == "padding" and count == 2 * axes and not getattr(a, "transposed", False)
        if count != axes and not uneven:
            raise InputError(f"{name} must have {axes} numbers, not {count}")
    for name in ("kernel", "stride", "dilation"):
        if min(getattr(a, name)) < 1:
            raise InputError(f"{name} must be positive, not {getattr(a, name)}")
    if min(a.padding) < 0:
        raise InputError(f"padding must not be negative, not {a.padding}")


def _check_packed(a: Any, expected: tuple[int, ...]) -> None:
    if a.w_packed.dtype != torch.int8 or a.w_packed.shape != expected:
        raise InputError(f"w_packed {tuple(a.w_packed.shape)} does not fit, expected {expected}")


def _shape(a: Any) -> list[int]:
    return _spatial_shape(a, a.w_sums.shape[-1])


def _spatial_shape(a: Any, n: int) -> list[int]:
    """Return the shape of a result of ``n`` channels; check the operands."""
    _check_window(a, "output_padding")
    if a.groups < 1:
        raise InputError(f"groups must be positive, not {a.groups}")
    axes = len(a.kernel)
    *batch, channels = a.x.shape[:-axes]
    size = a.x.shape[-axes:]
    if channels % a.groups or n % a.groups:
        raise InputError(f"{channels} channels and n={n} cannot be split into {a.groups} groups")
    blocks = (n // a.groups + BLOCK - 1) // BLOCK
    _check_packed(a, (a.groups, blocks, _depth(a, channels // a.groups), BLOCK, GROUP))
    if a.transposed:
        return [*batch, n, *transposed_size(a, size)]
    return [*batch, n, *output_size(size, a.kernel, a.stride, a.padding, a.dilation)]


def _grouped_shape(a: Any) -> list[int]:
    blocks, n = (a.out_channels // a.groups + BLOCK - 1) // BLOCK, a.out_channels
    shape = _spatial_shape(a, n)
    scales = a.w_scale.shape[2] if a.w_scale.dim() == 4 else 0  # noqa: PLR2004
    expected = (a.groups, blocks, scales, BLOCK)
    check_parameters("w_scale", a.w_scale, (torch.float32,), expected)
    check_parameters("w_sums", a.w_sums, (torch.int16, torch.int32), expected)
    return shape


def _depthwise_shape(a: Any) -> list[int]:
    _check_window(a)
    axes = len(a.kernel)
    *batch, channels = a.x.shape[:-axes]
    n, size = a.w_sums.shape[0], a.x.shape[-axes:]
    # Each input channel has the same number of output channels.
    if channels == 0 or n % channels:
        raise InputError(f"n={n} is not a multiple of {channels} channels")
    _check_packed(a, ((n + BLOCK - 1) // BLOCK, depthwise_groups(a.kernel), BLOCK, GROUP))
    return [*batch, n, *output_size(size, a.kernel, a.stride, a.padding, a.dilation)]


def _result(
    a: Any, possible: Collection[torch.dtype], shape: Callable[[Any], list[int]] = _shape
) -> torch.Tensor:
    if a.product_dtype not in FLOATS:
        raise InputError(f"product_dtype must be one of {FLOATS}, not {a.product_dtype}")
    if a.out_dtype not in possible:
        raise InputError(f"the result must be one of {possible}, not {a.out_dtype}")
    # Memory formats are defined with a batch axis only.
    unbatched = a.x.dim() == len(a.kernel) + 1
    memory_format = torch.contiguous_format if unbatched else memory_format_of(a.x)
    return torch.empty(shape(a), dtype=a.out_dtype, device=a.x.device, memory_format=memory_format)


convolution_w8a8: KernelOp[torch.Tensor] = KernelOp(
    "convolution_w8a8",
    lambda a: _result(a, FLOATS),
    defaults={**_DEFAULTS, **_WINDOW},
    like={"out_dtype": "product_dtype"},
)
convolution_w8a8_quantized: KernelOp[torch.Tensor] = KernelOp(
    "convolution_w8a8_quantized",
    lambda a: _result(a, BYTES),
    defaults={**_DEFAULTS, **_WINDOW, **_OUTPUT},
)
convolution_w8a8_grouped: KernelOp[torch.Tensor] = KernelOp(
    "convolution_w8a8_grouped",
    lambda a: _result(a, FLOATS, _grouped_shape),
    defaults={**_GROUPED, **_WINDOW},
    like={"out_dtype": "product_dtype"},
)
convolution_w8a8_grouped_quantized: KernelOp[torch.Tensor] = KernelOp(
    "convolution_w8a8_grouped_quantized",
    lambda a: _result(a, BYTES, _grouped_shape),
    defaults={**_GROUPED, **_WINDOW, **_OUTPUT},
)
convolution_depthwise_w8a8: KernelOp[torch.Tensor] = KernelOp(
    "convolution_depthwise_w8a8",
    lambda a: _result(a, FLOATS, _depthwise_shape),
    defaults=_DEFAULTS,
    like={"out_dtype": "product_dtype"},
)
convolution_depthwise_w8a8_quantized: KernelOp[torch.Tensor] = KernelOp(
    "convolution_depthwise_w8a8_quantized",
    lambda a: _result(a, BYTES, _depthwise_shape),
    defaults={**_DEFAULTS, **_OUTPUT},
)
