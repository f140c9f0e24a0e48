"""Images with epilogue ops and a quantized result, and what torch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.cases.convolution_kernel import output_of, quantized
from tests.support.cases.linear_kernel import codes

from qfuse.kernels import image_activation_quantized

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Blocks of 64, 32 and 16 channels, and of fewer; all of them in 127.
CHANNELS = (
    (1,),
    (7,),
    (16,),
    (32,),
    (48,),
    (64,),
    (127,),
    (192,),
    (64, 32, 32),
    (5, 0, 33),
    (3, 17),
)
SIZES = ((2, 5, 3), (1, 1, 1), (3, 1, 4), (1, 40, 41), (2, 3, 2, 3))


def last(x: torch.Tensor) -> torch.Tensor:
    """The same values, channels-last."""
    return x.contiguous(memory_format=FORMATS[x.dim()])


def part_of_a_split(x: torch.Tensor) -> torch.Tensor:
    """The same values as a part of the channels of another image."""
    n, c, *sizes = x.shape
    wide = last(torch.zeros((n, c + 5, *sizes), dtype=x.dtype))
    wide[:, 2 : c + 2] = x
    return wide[:, 2 : c + 2]


LAYOUTS: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "channels-last": lambda parts: [last(x) for x in parts],
    "parts of splits": lambda parts: [part_of_a_split(x) for x in parts],
    "rows": lambda parts: parts,
    "lines apart": lambda parts: [
        last(torch.nn.functional.pad(x, (1, 2)))[..., 1:-2] for x in parts
    ],
}


def per_channel(values: torch.Tensor, dims: int) -> torch.Tensor:
    """Values that broadcast to the channels of an image."""
    return values if values.numel() == 1 else values.reshape(-1, *(1,) * (dims - 2))


@dataclass(frozen=True)
class Case:
    """Images, their parameters, and float operands; ``expected`` applies ``steps`` in torch."""

    parts: list[torch.Tensor]
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    text: str = ""
    extras: list[torch.Tensor] = field(default_factory=list)
    steps: Callable[..., torch.Tensor] = lambda y: y
    output: dict[str, Any] = field(default_factory=lambda: output_of(torch.uint8))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = {"x_scale": self.scale, "x_zero_point": self.zero, "epilogue": self.text}
        args = self.parts[0], self.parts[1:] or None
        return args, {**given, "extras": self.extras or None, **self.output}

    def expected(self) -> torch.Tensor:
        y = torch.cat(self.parts, 1).float()
        if self.scale is not None:
            zero = torch.zeros(1) if self.zero is None else self.zero.float()
            y = (y - per_channel(zero, y.dim())) * per_channel(self.scale.float(), y.dim())
        return quantized(self.steps(y, *self.extras), self.output)

    def check(self) -> torch.Tensor:
        args, options = self.arguments()
        y, expected = image_activation_quantized(*args, **options), self.expected()
        assert torch.equal(y, expected), (self.text, self.output, self.scale, self.zero)
        assert y.stride() == torch.empty(y.shape, memory_format=FORMATS[y.dim()]).stride()
        return y


def images(
    size: Sequence[int], channels: Sequence[int], dtype: torch.dtype, layout: str = "channels-last"
) -> list[torch.Tensor]:
    n, *sizes = size
    shapes = [(n, c, *sizes) for c in channels]
    stored = not dtype.is_floating_point
    return LAYOUTS[layout]([codes(s, dtype) if stored else torch.randn(s) * 3 for s in shapes])


def norm(dims: int, channels: int) -> list[torch.Tensor]:
    """A factor and a summand per channel."""
    return [torch.randn(channels, *(1,) * (dims - 2)), torch.randn(channels, *(1,) * (dims - 2))]


NORM = "mul(0)|add(1,1.0)"


def normed(y: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return y * factor + shift
