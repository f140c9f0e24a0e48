"""The quantization ops: quantize, dequantize, requantize and choose_qparams.

The first three do not compute in float; their declarations only state what is quantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch.fx import Node

from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.fields import RESULT, ArgInfo
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.choose import ChooseSpec
from qfuse.ir.quant.choose import choose_qparams as choose_reference
from qfuse.ir.quant.spec import QuantSpec


class _Conversion(Op):
    """An op that changes the representation of values and nothing else."""

    @staticmethod
    def reference(value: torch.Tensor) -> torch.Tensor:
        """Return the values unchanged."""
        return value

    @classmethod
    def infer(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a tensor with the strides of the operand."""
        # The last parameters are those of the result, if the op quantizes one.
        value, *params = cls.values(args, kwargs).values()
        spec: QuantSpec = params[-1].spec
        is_stored = cls.layout.params[-1].of == RESULT
        return torch.empty_like(value, dtype=spec.dtype if is_stored else spec.float_dtype)


@define_op("quantize")
@dataclass(frozen=True, slots=True)
class Quantize(_Conversion):
    """A ``qfuse::quantize`` call."""

    x: Node
    params: Annotated[QuantParams, ArgInfo(of=RESULT)]


@define_op("dequantize")
@dataclass(frozen=True, slots=True)
class Dequantize(_Conversion):
    """A ``qfuse::dequantize`` call."""

    q: Node
    params: Annotated[QuantParams, ArgInfo(of="q")]


@define_op("requantize")
@dataclass(frozen=True, slots=True)
class Requantize(_Conversion):
    """A ``qfuse::requantize`` call: a dequantize and a quantize."""

    q: Node
    params: Annotated[QuantParams, ArgInfo(of="q")]
    out_params: QuantParams


@define_op("choose_qparams")
@dataclass(frozen=True, slots=True)
class Choose(Op):
    """A ``qfuse::choose_qparams`` call; its results are the ``getitem`` users 0 and 1.

    ``outer_scale`` is the scale that the chosen one is relative to, or ``None``.
    """

    x: Node
    spec: Annotated[ChooseSpec, ArgInfo("choose")]
    outer_scale: Node | None = None

    @staticmethod
    def reference(
        x: torch.Tensor, spec: ChooseSpec, outer_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and the zero point."""
        return choose_reference(x, spec, outer_scale)

    @classmethod
    def infer(
        cls, x: torch.Tensor, choose: str, outer_scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one element per block."""
        del outer_scale
        spec = ChooseSpec.parse(choose)
        grid = spec.grid(x.shape)
        scale = x.new_empty(grid, dtype=spec.scale_dtype)
        return scale, x.new_empty(grid, dtype=spec.zero_point_dtype)

    def problems(self) -> Iterator[str]:
        """Check that the second level of scales is present exactly if the spec requires it."""
        if (self.outer_scale is None) == self.spec.outer:
            yield f"the second scale must be present exactly if the spec has one: {self.spec}"


as_quantize = Quantize.of
as_dequantize = Dequantize.of
as_requantize = Requantize.of
as_choose = Choose.of
