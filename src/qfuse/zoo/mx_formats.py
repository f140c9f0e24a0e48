"""Linear layers in MX and other float formats, written in qfuse's own ops.

They compute the same as torchao's ``MXTensor`` (emulated), ``NVFP4Tensor`` and ``Float8Tensor``, on
any machine: the activation is viewed as rows, dynamically quantized in blocks along the rows,
dequantized, and multiplied by the dequantized weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from qfuse.ir.ops import library as ops
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import CONTAINER, Element, ScaleFormat
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain, stored_range

_E4M3_LEAST = torch.finfo(torch.float8_e4m3fn).tiny


@dataclass(frozen=True)
class MxFormat:
    """A format of rows in blocks.

    Attributes:
        spec: The quantization of rows; its float dtype is that of the model.
        choose: The computation of block scales.
        outer: The computation of the second-level scales, if any.
    """

    spec: QuantSpec
    choose: ChooseSpec
    outer: ChooseSpec | None = None

    @property
    def block(self) -> int | None:
        """Elements of a row that share a scale; ``None`` for the whole row."""
        return self.spec.block[-1]

    @property
    def weight(self) -> MxFormat:
        """The format of weights: a scale per row where activations have one for all."""
        if self.spec.block[0] is not None:
            return self
        block = (1, None)
        return MxFormat(self.spec.with_block(block), replace(self.choose, block=block))


def mx(element: Element = Element.WHOLE, rounding: Formula = Formula.MX_RCEIL) -> MxFormat:
    """Blocks of 32 with a power of two; the elements are ``float8_e4m3fn`` or narrower."""
    codes = stored_range(CONTAINER, element)
    # Of the ways to round the exponent, this one multiplies by the reciprocal.
    math = Arithmetic(reciprocal=rounding is Formula.MX_RCEIL)
    block = (1, 32)
    return MxFormat(
        QuantSpec(
            CONTAINER,
            *codes,
            block,
            arithmetic=math,
            domain=ZeroPointDomain.NONE,
            element=element,
            scale_format=ScaleFormat.E8M0,
        ),
        ChooseSpec(
            rounding,
            CONTAINER,
            *codes,
            block,
            0.0,
            torch.float8_e8m0fnu,
            element=element,
        ),
    )


def float8(*, per_tensor: bool = False) -> MxFormat:
    """Rows of ``float8_e4m3fn`` with a scale each, or one for all rows of the activation."""
    codes = stored_range(CONTAINER, Element.WHOLE)
    block = (None if per_tensor else 1, None)
    divide = Arithmetic(reciprocal=False)
    spec = QuantSpec(CONTAINER, *codes, block, arithmetic=divide, domain=ZeroPointDomain.NONE)
    return MxFormat(spec, ChooseSpec(Formula.AO_FLOAT8, CONTAINER, *codes, block, 0.0))


def nvfp4() -> MxFormat:
    """Blocks of 16 with a scale in ``float8_e4m3fn``, relative to one of the whole tensor."""
    element = Element.E2M1
    codes = stored_range(CONTAINER, element)
    spec = QuantSpec(
        CONTAINER,
        *codes,
        (1, 16),
        domain=ZeroPointDomain.NONE,
        element=element,
        scale_format=ScaleFormat.E4M3,
        outer=(None, None),
    )
    choose = ChooseSpec(
        Formula.NVFP4,
        CONTAINER,
        *codes,
        (1, 16),
        _E4M3_LEAST,
        torch.float8_e4m3fn,
        element=element,
        outer=True,
    )
    whole = ChooseSpec(Formula.NVFP4_OUTER, CONTAINER, *codes, (None, None), 0.0, element=element)
    return MxFormat(spec, choose, whole)


def peak_scale(peak: torch.Tensor) -> torch.Tensor:
    """Return the second-level scale of activations with this greatest magnitude, for NVFP4."""
    _, outer = _scales(peak.reshape(1, 1), nvfp4(), None)
    assert outer is not None, "the format has two levels"
    return outer


class MxLinear(nn.Module):
    """A linear layer that multiplies rows and a weight of one format.

    Args:
        linear: The layer to replace; its weight is quantized.
        form: The format.
        act_outer_scale: The calibrated second-level scale of activations, if static.
        weights_only: Do not quantize activations.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_outer_scale: torch.Tensor | None
    act_outer_scale: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        linear: nn.Linear,
        form: MxFormat,
        act_outer_scale: torch.Tensor | None = None,
        *,
        weights_only: bool = False,
    ) -> None:
        super().__init__()
        # Dequantized values have the dtype of the model, as those of torchao have.
        self.form = replace(form, spec=replace(form.spec, float_dtype=linear.weight.dtype))
        self.weights_only = weights_only
        form = self.form.weight
        with torch.no_grad():
            scale, outer = _scales(linear.weight, form, None)
            stored = ops.quantize(linear.weight, scale, None, str(form.spec), outer)
        self.register_buffer("weight", stored)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_outer_scale", outer)
        self.register_buffer("act_outer_scale", act_outer_scale)
        bias: torch.Tensor | None = linear.bias
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        spec, stored_as = str(self.form.spec), str(self.form.weight.spec)
        weight = ops.dequantize(
            self.weight, self.weight_scale, None, stored_as, self.weight_outer_scale
        )
        if self.weights_only:
            return F.linear(x, weight, self.bias)
        # The spec has two axes, whatever the rank of the activation is.
        rows = x.reshape(-1, x.shape[-1])
        scale, outer = _scales(rows, self.form, self.act_outer_scale)
        stored = ops.quantize(rows, scale, None, spec, outer)
        y = F.linear(ops.dequantize(stored, scale, None, spec, outer), weight, self.bias)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        """Return the text for ``repr``."""
        n, k = self.weight.shape
        return f"in_features={k}, out_features={n}, spec={self.form.spec}"


def _scales(
    x: torch.Tensor, form: MxFormat, outer: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the scales of a matrix, of both levels if there are two."""
    if form.outer is not None and outer is None:
        outer, _ = ops.choose_qparams(x, str(form.outer))
    scale, _ = ops.choose_qparams(x, str(form.choose), outer)
    return scale, outer
