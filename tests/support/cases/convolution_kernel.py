"""Random int8 convolutions for the kernels, and their exact reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.cases.linear_kernel import codes

from qfuse.ir.ops.epilogue import Epilogue
from qfuse.kernels import (
    convolution_depthwise_w8a8,
    convolution_depthwise_w8a8_quantized,
    convolution_sums,
    convolution_w8a8,
    convolution_w8a8_quantized,
    pack_convolution,
    pack_depthwise,
    pack_transposed,
    transposed_sums,
)

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_NOT_DEPTHWISE = ("output_padding", "transposed", "groups")
WINDOW = ("kernel", "stride", "padding", "dilation", "output_padding", "transposed", "groups")
"""The spatial arguments, in the order of the ops."""

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Window:
    """The spatial arguments, one number per axis; those of the padding may be before and after."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool
    groups: int

    def named(self) -> dict[str, Any]:
        """The arguments of an op."""
        given = {name: getattr(self, name) for name in WINDOW}
        return {n: list(value) if isinstance(value, tuple) else value for n, value in given.items()}

    def weight_shape(self, channels: int, features: int) -> tuple[int, ...]:
        """The shape of torch's weight."""
        if self.transposed:
            return (channels, features // self.groups, *self.kernel)
        return (features, channels // self.groups, *self.kernel)

    def features(self, weight: torch.Tensor) -> int:
        """The output channels of torch's weight."""
        return weight.shape[1] * self.groups if self.transposed else weight.shape[0]


def window(
    *kernel: int,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    output_padding: int | tuple[int, ...] = 0,
    transposed: bool = False,
    groups: int = 1,
) -> Window:
    """Return a window; a single number counts for every axis."""

    def spread(value: int | tuple[int, ...]) -> tuple[int, ...]:
        return (value,) * len(kernel) if isinstance(value, int) else value

    return Window(
        kernel, spread(stride), spread(padding), spread(dilation), spread(output_padding),
        transposed, groups,
    )  # fmt: skip


GEOMETRIES = [
    ((2, 6, 9), window(3, stride=2, padding=1, groups=2)),
    ((6, 9), window(3, dilation=2)),
    ((2, 6, 9, 8), window(3, 3, stride=2, padding=(0, 2, 1, 0))),
    ((2, 6, 9, 8), window(3, 3, stride=2, padding=1)),
    ((6, 9, 8), window(1, 1)),
    ((0, 6, 9, 8), window(1, 1)),
    ((2, 6, 5, 9, 8), window(3, 3, 1, padding=(1, 1, 0))),
    ((2, 6, 9, 8), window(3, 2, stride=2, output_padding=(1, 0), transposed=True, groups=2)),
    ((2, 6, 9), window(4, stride=3, padding=2, transposed=True)),
]


@dataclass(frozen=True)
class Convolution:
    """One problem. ``weight`` is torch's; everything else is what the op takes."""

    x: torch.Tensor
    weight: torch.Tensor
    window: Window
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    x_zero_point: torch.Tensor | None = None
    w_zero_point: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    depthwise: bool = False  # with the depthwise kernel
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> int:
        """Output channels."""
        return self.window.features(self.weight)

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight and its sums as the op takes them."""
        w, zero = self.window, self.w_zero_point
        if self.depthwise:
            return pack_depthwise(self.weight), convolution_sums(self.weight, zero)
        if w.transposed:
            phases = (w.stride, w.dilation, w.groups)
            return pack_transposed(self.weight, *phases), transposed_sums(
                self.weight, *phases, zero
            )
        return pack_convolution(self.weight, w.groups), convolution_sums(self.weight, zero)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = (self.x, self.x_scale, self.x_zero_point, *self.packed(), self.w_scale)
        options = {"w_zero_point": self.w_zero_point, "bias": self.bias, **self.options}
        spatial = self.window.named()
        for name in _NOT_DEPTHWISE if self.depthwise else ():
            del spatial[name]
        return args, {**spatial, **options}

    def run(self) -> torch.Tensor:
        args, options = self.arguments()
        op = convolution_depthwise_w8a8 if self.depthwise else convolution_w8a8
        return op(*args, **options)

    def run_quantized(self, **output: Any) -> torch.Tensor:
        args, options = self.arguments()
        op = convolution_depthwise_w8a8_quantized if self.depthwise else convolution_w8a8_quantized
        return op(*args, **{**options, **output})

    def total(self) -> torch.Tensor:
        """The integer sums, exactly: float64 holds them."""
        x, weight, w = self.x.double(), self.weight.double(), self.window
        if self.x_zero_point is not None:
            x = x - self.x_zero_point.double().reshape(())
        if self.w_zero_point is not None:
            zero = self.w_zero_point.double()
            shape = (w.groups, 1, -1) if w.transposed else (1, -1, 1)
            zero = zero.expand(self.features).reshape(shape)
            parts = weight.reshape(shape[0], -1, *weight.shape[1:])
            weight = (parts - zero.reshape(*zero.shape, *[1] * len(w.kernel))).flatten(0, 1)
        return convolved(x.contiguous(), weight, w)

    def real(self) -> torch.Tensor:
        """The convolution in float32, in the order that the op promises."""
        y = self.total().float() * self.x_scale.float().reshape(())
        y = y * per_channel(self.w_scale, self.window)
        return y if self.bias is None else y + per_channel(self.bias, self.window)

    def expected(self) -> torch.Tensor:
        """The result, in the memory format of torch's."""
        y = self.real().to(self.options.get("product_dtype", torch.float32))
        y = Epilogue.parse(self.options.get("epilogue", "")).apply(
            y, self.options.get("extras", [])
        )
        batched = self.x.dim() == len(self.window.kernel) + 2
        return in_format_of(self.x, y) if batched else y.contiguous()

    def with_options(self, **options: Any) -> Convolution:
        return replace(self, options={**self.options, **options})


def convolved(x: torch.Tensor, weight: torch.Tensor, w: Window) -> torch.Tensor:
    """Return a convolution; if it is not transposed, the paddings of an axis may differ."""
    axes = len(w.kernel)
    if w.transposed:
        settings = (w.stride, w.padding, w.output_padding, w.groups, w.dilation)
        return _TRANSPOSED[axes](x, weight, None, *settings)
    sides = zip(w.padding[:axes], w.padding[-axes:], strict=True)
    x = F.pad(x, [pad for side in reversed(list(sides)) for pad in side])
    return _CONV[axes](x, weight, None, w.stride, 0, w.dilation, w.groups)


def in_format_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``y`` in the memory format of the result of a convolution of ``x``."""
    last = x.dim() in _LAST and torch._prims_common.suggest_memory_format(x) == _LAST[x.dim()]
    memory_format = _LAST[x.dim()] if last else torch.contiguous_format
    # Not `contiguous`, which takes any strides of axes of size 1.
    return torch.empty(y.shape, dtype=y.dtype, memory_format=memory_format).copy_(y)


def image(x: torch.Tensor, *, last: bool) -> torch.Tensor:
    """Return ``x``, channels last if its rank has that."""
    return x.contiguous(memory_format=_LAST[x.dim()]) if last and x.dim() in _LAST else x


def per_channel(values: torch.Tensor, w: Window) -> torch.Tensor:
    """One value per output channel, to broadcast against a result."""
    return values.float().reshape(-1, *[1] * len(w.kernel))


def convolution(  # noqa: PLR0913 - what a problem can have
    shape: tuple[int, ...],
    features: int,
    w: Window,
    *,
    dtype: torch.dtype = torch.int8,
    zero_point: bool = True,
    weight_zero_point: bool = False,
    per_channel_scale: bool = True,
    bias: bool = True,
    last: bool = True,
) -> Convolution:
    """A random problem with ``x`` of ``shape``; no scale is a power of two.

    Args:
        last: Whether ``x`` is channels last, if its rank has that.
    """
    x = image(codes(shape, dtype), last=last)
    info = torch.iinfo(dtype)
    zero = torch.randint(info.min, info.max + 1, (1,), dtype=torch.int32)
    return Convolution(
        x=x,
        weight=codes(w.weight_shape(shape[-1 - len(w.kernel)], features), torch.int8),
        window=w,
        x_scale=torch.rand(1) * 0.01 + 0.003,
        w_scale=torch.rand(features if per_channel_scale else 1) * 0.01 + 0.003,
        x_zero_point=zero if zero_point else None,
        w_zero_point=torch.randint(-8, 8, (features,), dtype=torch.int32)
        if weight_zero_point
        else None,
        bias=torch.randn(features) if bias else None,
    )


def depthwise(shape: tuple[int, ...], w: Window, *, multiple: int = 1, **kind: Any) -> Convolution:
    """A random depthwise problem.

    Args:
        shape: Of ``x``.
        w: The window; its groups are replaced.
        multiple: Output channels per input channel.
        kind: As for :func:`convolution`.
    """
    channels = shape[-1 - len(w.kernel)]
    case = convolution(shape, channels * multiple, replace(w, groups=channels), **kind)
    return replace(case, depthwise=True)


def output_of(
    dtype: torch.dtype, low: int = 0, high: int = 255, zero: int = 0, scale: float = 0.037
) -> dict[str, Any]:
    """A result in steps of ``scale``; the range counts from the least value of ``dtype``."""
    least = torch.iinfo(dtype).min
    return {
        "out_scale": torch.tensor([scale]),
        "out_zero_point": torch.tensor([zero + least]),
        "quant_min": low + least,
        "quant_max": high + least,
        "out_dtype": dtype,
    }


def quantized(y: torch.Tensor, o: dict[str, Any]) -> torch.Tensor:
    """What the op promises, in torch; what is not a number becomes 0."""
    scale, zero = o["out_scale"], o["out_zero_point"].float()
    y = y * scale.reciprocal().float() if o.get("reciprocal", True) else y / scale.float()
    y = (y + zero).round() if o.get("zero_point_first", False) else y.round() + zero
    return y.clamp(o["quant_min"], o["quant_max"]).nan_to_num(0.0).to(o["out_dtype"])
