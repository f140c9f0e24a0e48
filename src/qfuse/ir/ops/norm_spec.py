"""How a normalization computes, as data, text and meaning. Sources round at other places."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch
import torch.nn.functional as F

from qfuse.ir.errors import NormalizeError
from qfuse.ir.quant.spec import dtype_name, parse_dtype


class Statistic(StrEnum):
    """Where the variance of a layer norm comes from; an RMS norm has the mean of squares only.

    ``SQUARES``: the mean of the squares. ``VARIANCE``: ``torch.var`` without correction, which
    sums in another order. ``WHOLE``: the norm is ``torch.layer_norm``, one op that sums in an order
    of its own and rounds nothing on the way; ``root``, ``product`` and ``rounded`` say nothing.
    """

    SQUARES = "squares"
    VARIANCE = "variance"
    WHOLE = "whole"


class Root(StrEnum):
    """How one divides by a square root; all four round differently.

    ``RSQRT``: multiply by ``rsqrt(v)``. ``RECIPROCAL``: multiply by ``1 / sqrt(v)``. ``DIVIDE``:
    divide by ``sqrt(v)``. ``POWER``: multiply by ``v ** -0.5``.
    """

    RSQRT = "rsqrt"
    RECIPROCAL = "reciprocal"
    DIVIDE = "divide"
    POWER = "power"


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Everything about a norm over the last axes of a tensor except its tensors.

    The tensor is cast to ``compute`` for the statistics. It and the factor are cast to ``product``
    and multiplied, the product is cast to ``rounded``, scaled by the weight, shifted by the bias,
    and cast to ``out``. Types promote as torch does.

    Attributes:
        axes: How many axes, from the last, are normalized over.
        eps: What is added to the variance.
        compute: Type of the statistics.
        product: Type in which the tensor is multiplied by the factor.
        rounded: Type that the product is rounded to before the weight.
        out: Type of the result.
        root: How the root is spelled.
        statistic: Where the variance comes from.
    """

    axes: int
    eps: float
    compute: torch.dtype
    product: torch.dtype
    rounded: torch.dtype
    out: torch.dtype
    root: Root = Root.RSQRT
    statistic: Statistic = Statistic.SQUARES

    def __post_init__(self) -> None:
        if self.axes < 1:
            raise NormalizeError(f"a norm is over one axis at least, not {self.axes}")
        if not 0 <= self.eps < math.inf:
            raise NormalizeError(f"eps of a norm is finite and not negative, not {self.eps}")

    def __str__(self) -> str:
        types = ":".join(map(dtype_name, (self.compute, self.product, self.rounded, self.out)))
        return f"axes={self.axes} eps={self.eps!r} {types} {self.root} {self.statistic}"

    @classmethod
    def parse(cls, text: str) -> NormSpec:
        """Read the canonical text back.

        >>> spec = NormSpec(1, 1e-6, *[torch.float32] * 3, torch.bfloat16)
        >>> str(spec)
        'axes=1 eps=1e-06 float32:float32:float32:bfloat16 rsqrt squares'
        >>> NormSpec.parse(str(spec)) == spec
        True

        Raises:
            NormalizeError: The text is not a norm.
        """
        return _parse(text)


_TEXT = re.compile(
    r"axes=(?P<axes>\d+) eps=(?P<eps>\d+(\.\d+)?(e[+-]?\d+)?) (?P<types>\w+(:\w+){3}) "
    rf"(?P<root>{'|'.join(Root)}) (?P<statistic>{'|'.join(Statistic)})"
)


@cache
def _parse(text: str) -> NormSpec:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise NormalizeError(f"not the text of a norm: {text!r}")
    compute, product, rounded, out = map(parse_dtype, found["types"].split(":"))
    return NormSpec(
        int(found["axes"]),
        float(found["eps"]),
        compute,
        product,
        rounded,
        out,
        Root(found["root"]),
        Statistic(found["statistic"]),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, spec: NormSpec) -> torch.Tensor:
    """Divide by the root of the mean square: ``x / sqrt(mean(x * x) + eps) * weight``.

    Args:
        x: Real tensor; its last ``spec.axes`` axes are normalized over.
        weight: Broadcasts over ``x``, or ``None``.
        spec: Everything else.

    Returns:
        A tensor of ``x``'s shape and dtype ``spec.out``.
    """
    wide = x.to(spec.compute)
    y = _scaled(x, _mean(wide * wide, spec), spec)
    return (y if weight is None else y * weight).to(spec.out)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, spec: NormSpec
) -> torch.Tensor:
    """Centre, and divide by the deviation: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Args:
        x: Real tensor; its last ``spec.axes`` axes are normalized over.
        weight: Broadcasts over ``x``, or ``None``.
        bias: Broadcasts over ``x``, or ``None``.
        spec: Everything else.

    Returns:
        A tensor of ``x``'s shape and dtype ``spec.out``.
    """
    wide = x.to(spec.compute)
    if spec.statistic is Statistic.WHOLE:
        shape = wide.shape[-spec.axes :]
        return F.layer_norm(wide, shape, weight, bias, spec.eps).to(spec.out)
    centred = wide - _mean(wide, spec)
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
    variance = variance + spec.eps
    narrow = x.to(spec.product)
    if spec.root is Root.DIVIDE:
        return (narrow / variance.sqrt().to(spec.product)).to(spec.rounded)
    return (narrow * _factor(variance, spec.root).to(spec.product)).to(spec.rounded)


def _factor(variance: torch.Tensor, root: Root) -> torch.Tensor:
    if root is Root.RECIPROCAL:
        return variance.sqrt().reciprocal()
    return variance.rsqrt() if root is Root.RSQRT else variance.pow(-0.5)
