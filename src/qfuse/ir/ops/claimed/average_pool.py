"""Average pools, and means over axes, of quantized values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch.fx import Node

from qfuse.ir.errors import NormalizeError
from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.views import QuantParams

_TEXT = re.compile(
    r"(?P<kind>windows|adaptive|mean) (?P<sizes>[-\d,]+)"
    r"( stride=(?P<stride>[\d,]+))?( padding=(?P<padding>[\d,]+))?"
    r"(?P<ceil> ceil)?(?P<valid> valid)?( divisor=(?P<divisor>-?\d+))?(?P<keep> keep)?"
)
_POOLS: tuple[Callable[..., torch.Tensor], ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_ADAPTIVE: tuple[Callable[..., torch.Tensor], ...] = (
    F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d,
)


class PoolKind(StrEnum):
    """What is averaged: windows, regions that divide the image, or whole axes."""

    WINDOWS = "windows"
    ADAPTIVE = "adaptive"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Everything about an average pool except its tensors.

    Attributes:
        kind: What is averaged.
        sizes: The sizes of windows, the sizes of an adaptive result, or the axes of a mean.
        stride: The steps of windows; none means their sizes.
        padding: The padding of windows.
        ceil: Whether a window may begin in the padding behind the image.
        valid: Whether windows are divided by the number of elements that are not padding.
        divisor: What windows are divided by instead.
        keep: Whether a mean keeps its axes, with size 1.
    """

    kind: PoolKind
    sizes: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    ceil: bool = False
    valid: bool = False
    divisor: int | None = None
    keep: bool = False

    def __str__(self) -> str:
        parts = [self.kind.value, _join(self.sizes)]
        parts += [f"stride={_join(self.stride)}"] if self.stride else []
        parts += [f"padding={_join(self.padding)}"] if self.padding else []
        parts += [name for name in ("ceil", "valid") if getattr(self, name)]
        parts += [] if self.divisor is None else [f"divisor={self.divisor}"]
        return " ".join((*parts, "keep") if self.keep else parts)

    @classmethod
    def parse(cls, text: str) -> PoolSpec:
        """Parse the canonical text.

        >>> PoolSpec.parse("windows 3,3 stride=2,2 padding=1,1 valid").stride
        (2, 2)

        Raises:
            NormalizeError: The text is not an average pool.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise NormalizeError(f"not the text of an average pool: {text!r}")
        divisor = found["divisor"]
        return cls(
            PoolKind(found["kind"]),
            _split(found["sizes"]),
            stride=_split(found["stride"]),
            padding=_split(found["padding"]),
            ceil=found["ceil"] is not None,
            valid=found["valid"] is not None,
            divisor=None if divisor is None else int(divisor),
            keep=found["keep"] is not None,
        )

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the op by the call that the source makes."""
        axes = len(self.sizes)
        if self.kind is PoolKind.MEAN:
            return x.mean(self.sizes, self.keep)
        if self.kind is PoolKind.ADAPTIVE:
            return _ADAPTIVE[axes - 1](x, self.sizes)
        windows = self.sizes, self.stride or self.sizes, self.padding or (0,) * axes
        # One axis has no divisor.
        more = () if axes == 1 else (self.divisor,)
        return _POOLS[axes - 1](x, *windows, self.ceil, not self.valid, *more)


def _join(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _split(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


@define_op("average_pool")
@dataclass(frozen=True, slots=True)
class AveragePool(Op):
    """A ``qfuse::average_pool`` call; without quantization parameters ``x`` or the result is float.

    Backends claim it; what none claims is expanded.
    """

    x: Node
    x_params: QuantParams | None
    out_params: QuantParams | None
    pool: PoolSpec

    @staticmethod
    def reference(x: torch.Tensor, pool: PoolSpec) -> torch.Tensor:
        """Average in float."""
        return pool.apply(x)


as_average_pool = AveragePool.of
