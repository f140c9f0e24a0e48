"""The quantization ops: quantize, dequantize, requantize, and the choice of parameters.

The declarations say all of the first three: they differ in what is quantized, and compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch.fx import Node

from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.fields import RESULT, Arg
from qfuse.ir.ops.views import QuantParams, dtype_of
from qfuse.ir.quant.choose import ChooseSpec
from qfuse.ir.quant.choose import choose_qparams as choose_reference
from qfuse.ir.quant.spec import QuantSpec


@define_op("quantize")
@dataclass(frozen=True, slots=True)
class Quantize(Op):
    """A ``qfuse::quantize`` call."""

    x: Node
    params: Annotated[QuantParams, Arg(of=RESULT)]

    @staticmethod
    def reference(x: torch.Tensor) -> torch.Tensor:
        """Leave the values as they are."""
        return x

    @staticmethod
    def fake(x: torch.Tensor, params: QuantSpec) -> torch.Tensor:
        """Return what lies in memory like ``x``."""
        return torch.empty_like(x, dtype=params.dtype)

    def float_type(self) -> torch.dtype:
        """Return the type of ``x``."""
        return dtype_of(self.x)


@define_op("dequantize")
@dataclass(frozen=True, slots=True)
class Dequantize(Op):
    """A ``qfuse::dequantize`` call."""

    q: Node
    params: Annotated[QuantParams, Arg(of="q")]

    @staticmethod
    def reference(q: torch.Tensor) -> torch.Tensor:
        """Leave the values as they are."""
        return q

    @staticmethod
    def fake(q: torch.Tensor, params: QuantSpec) -> torch.Tensor:
        """Return what lies in memory like ``q``."""
        return torch.empty_like(q, dtype=params.real)

    def problems(self) -> Iterator[str]:
        """Check the type of the result."""
        if dtype_of(self.node) != self.params.spec.real:
            yield f"real numbers are {dtype_of(self.node)}, the spec says {self.params.spec}"


@define_op("requantize")
@dataclass(frozen=True, slots=True)
class Requantize(Op):
    """A ``qfuse::requantize`` call: a dequantize and a quantize."""

    q: Node
    params: Annotated[QuantParams, Arg(of="q")]
    out_params: QuantParams

    @staticmethod
    def reference(q: torch.Tensor) -> torch.Tensor:
        """Leave the values as they are."""
        return q

    @staticmethod
    def fake(q: torch.Tensor, params: QuantSpec, out_params: QuantSpec) -> torch.Tensor:
        """Return what lies in memory like ``q``."""
        del params
        return torch.empty_like(q, dtype=out_params.dtype)

    def float_type(self) -> torch.dtype:
        """Return the type between the two."""
        return self.params.spec.real


@define_op("choose_qparams")
@dataclass(frozen=True, slots=True)
class Choose(Op):
    """A ``qfuse::choose_qparams`` call; its results are the ``getitem`` users 0 and 1.

    ``outer_scale`` is what the chosen scale is relative to, or ``None``.
    """

    x: Node
    spec: Annotated[ChooseSpec, Arg("choose")]
    outer_scale: Node | None = None

    @staticmethod
    def reference(
        x: torch.Tensor, spec: ChooseSpec, outer_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and the zero point."""
        return choose_reference(x, spec, outer_scale)

    @staticmethod
    def fake(
        x: torch.Tensor, spec: ChooseSpec, outer_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one element per block."""
        del outer_scale
        grid = spec.grid(x.shape)
        scale = x.new_empty(grid, dtype=spec.scale_dtype)
        return scale, x.new_empty(grid, dtype=spec.zero_point_dtype)

    def problems(self) -> Iterator[str]:
        """Check that a second level is given or chosen."""
        if (self.outer_scale is None) == self.spec.outer:
            yield f"a second scale is given or asked for, not both: {self.spec}"


as_quantize = Quantize.of
as_dequantize = Dequantize.of
as_requantize = Requantize.of
as_choose = Choose.of
