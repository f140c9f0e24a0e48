"""Norms, with an optional residual add before and quantization after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch.fx import Node

from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.fields import ArgInfo
from qfuse.ir.ops.norm_spec import NormSpec, Root, Statistic
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.views import QuantParams


@define_op("rms_norm")
@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """A ``qfuse::rms_norm`` call; its results are its ``getitem`` users.

    Without quantization parameters ``x`` and ``residual`` are float.
    """

    x: Node
    x_params: Annotated[QuantParams | None, ArgInfo(levels=1)]
    residual: Node | None
    residual_params: Annotated[QuantParams | None, ArgInfo(levels=1)]
    weight: Node | None
    norm: NormSpec
    output: Output

    @staticmethod
    def reference(
        x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, norm: NormSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Divide by the root of the mean square: ``x / sqrt(mean(x * x) + eps) * weight``."""
        total = x if residual is None else x + residual
        wide = total.to(norm.compute)
        # The product takes the tensor as it came, not its cast to `compute`: sources differ in
        # where they round (see `NormSpec`).
        y = _scaled(total, _mean(wide * wide, norm), norm)
        y = (y if weight is None else y * weight).to(norm.out)
        return y, None if residual is None else total

    def float_types(self) -> tuple[torch.dtype, ...]:
        """Return the result dtype of the norm's spec."""
        return (self.norm.out,)


@define_op("layer_norm")
@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """A ``qfuse::layer_norm`` call; its results are its ``getitem`` users.

    Without quantization parameters ``x`` and ``residual`` are float.
    """

    x: Node
    x_params: Annotated[QuantParams | None, ArgInfo(levels=1)]
    residual: Node | None
    residual_params: Annotated[QuantParams | None, ArgInfo(levels=1)]
    weight: Node | None
    bias: Node | None
    norm: NormSpec
    output: Output

    @staticmethod
    def reference(
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: NormSpec,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Center and divide by the deviation: ``(x - mean) / sqrt(var + eps) * weight + bias``."""
        total = x if residual is None else x + residual
        return _layer_norm(total, weight, bias, norm), None if residual is None else total

    def float_types(self) -> tuple[torch.dtype, ...]:
        """Return the result dtype of the norm's spec."""
        return (self.norm.out,)


FusedNorm = RmsNorm | LayerNorm

as_rms_norm = RmsNorm.of
as_layer_norm = LayerNorm.of


def as_fused_norm(value: object) -> FusedNorm | None:
    """View ``value`` as a fused norm of either kind, or ``None``."""
    return as_rms_norm(value) or as_layer_norm(value)


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, spec: NormSpec
) -> torch.Tensor:
    wide = x.to(spec.compute)
    if spec.statistic is Statistic.WHOLE:
        shape = wide.shape[-spec.axes :]
        return F.layer_norm(wide, shape, weight, bias, spec.eps).to(spec.out)
    centred = wide - _mean(wide, spec)
    # `torch.var` sums in another order than the mean of squares.
    if spec.statistic is Statistic.VARIANCE:
        variance = torch.var(wide, _axes(spec), correction=0, keepdim=True)
    else:
        variance = _mean(centred * centred, spec)
    y = _scaled(centred, variance, spec)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(spec.out)


def _axes(spec: NormSpec) -> list[int]:
    return list(range(-spec.axes, 0))


def _mean(x: torch.Tensor, spec: NormSpec) -> torch.Tensor:
    return torch.mean(x, _axes(spec), keepdim=True)


def _scaled(x: torch.Tensor, variance: torch.Tensor, spec: NormSpec) -> torch.Tensor:
    """Divide by the root of the variance, in ``spec.product``, rounded to ``spec.rounded``."""
    # In `compute`, where the patterns require the source to add it.
    variance = variance + spec.eps
    narrow = x.to(spec.product)
    if spec.root is Root.DIVIDE:
        return (narrow / variance.sqrt().to(spec.product)).to(spec.rounded)
    return (narrow * _factor(variance, spec.root).to(spec.product)).to(spec.rounded)


def _factor(variance: torch.Tensor, root: Root) -> torch.Tensor:
    if root is Root.RECIPROCAL:
        return variance.sqrt().reciprocal()
    return variance.rsqrt() if root is Root.RSQRT else variance.pow(-0.5)
