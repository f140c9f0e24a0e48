"""The arithmetic of a norm, as data and text. Sources round at different places."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import torch

from qfuse.ir.errors import NormalizeError
from qfuse.ir.quant.spec import dtype_name, parse_dtype


class Statistic(StrEnum):
    """How the variance of a layer norm is computed; an RMS norm only has the mean of squares.

    ``SQUARES``: the mean of the squares. ``VARIANCE``: ``torch.var`` without correction, which
    sums in a different order. ``WHOLE``: the norm is ``torch.layer_norm``, one op with its own
    summation order and no intermediate rounding; ``root``, ``product`` and ``rounded`` are unused.
    """

    SQUARES = "squares"
    VARIANCE = "variance"
    WHOLE = "whole"


class Root(StrEnum):
    """How to divide by a square root; all four round differently.

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
    and cast to ``out``. Dtypes promote as in torch.

    Attributes:
        axes: Number of trailing axes that are normalized over.
        eps: Added to the variance.
        compute: Dtype of the statistics.
        product: Dtype in which the tensor is multiplied by the factor.
        rounded: Dtype that the product is rounded to before the weight.
        out: Dtype of the result.
        root: How the division by the root is computed.
        statistic: How the variance is computed.
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
        """Parse the canonical text.

        >>> spec = NormSpec(1, 1e-6, *[torch.float32] * 3, torch.bfloat16)
        >>> str(spec)
        'axes=1 eps=1e-06 float32:float32:float32:bfloat16 rsqrt squares'
        >>> NormSpec.parse(str(spec)) == spec
        True

        Raises:
            NormalizeError: The text is not a norm.
        """
        return _parse(text)

    def widened(self) -> NormSpec:
        """Return the norm that computes in float64."""
        wide = torch.float64
        return replace(self, compute=wide, product=wide, rounded=wide, out=wide)


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
