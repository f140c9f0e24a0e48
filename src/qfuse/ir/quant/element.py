"""Microscaling number formats: elements of less than 8 bits, and scale formats.

Elements of 4 and 6 bits are stored as their values in ``float8_e4m3fn``, which holds all of them
(including -0.0), one per byte. So code that multiplies quantized values by a scale is correct
without knowing the format; only quantize, which rounds to it, depends on it. Bit codes are only a
memory layout: :func:`encode` and :func:`decode` convert between values and codes.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch

CONTAINER = torch.float8_e4m3fn
"""The storage dtype of elements of less than 8 bits."""

_FIELD = 23  # bit position of the exponent in a float32
_BIAS = 127
_NAN_CODE = 255


class Element(StrEnum):
    """The format of quantized values that use a subset of the storage dtype's values.

    The other names are those of the Open Compute Project: sign, exponent, mantissa. These formats
    have subnormals and a negative zero, but no infinities or NaN.
    """

    WHOLE = ""
    E2M1 = "float4_e2m1"
    E2M3 = "float6_e2m3"
    E3M2 = "float6_e3m2"

    @property
    def exponent_bits(self) -> int:
        """Width of the exponent."""
        # The names end in `e<width of exponent>m<width of mantissa>`.
        return int(self.value[-3])

    @property
    def mantissa_bits(self) -> int:
        """Width of the mantissa."""
        return int(self.value[-1])

    @property
    def least_exponent(self) -> int:
        """Exponent of the smallest normal number, and of the subnormal ones."""
        # The bias is 2^(e-1) - 1, and the smallest normal number has 1 in its exponent field.
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def greatest(self) -> float:
        """The largest finite value: 6.0, 7.5 and 28.0."""
        # Without infinities and NaN, the highest exponent field holds numbers too.
        top = self.least_exponent + (1 << self.exponent_bits) - 2
        return math.ldexp(2 - math.ldexp(1, -self.mantissa_bits), top)


class ScaleFormat(StrEnum):
    """How block scales are stored.

    ``FLOAT``: in a dtype that torch computes in. ``E8M0``: a power of two, 2^-127 to 2^127, or NaN.
    ``E4M3``: ``float8_e4m3fn``.
    """

    FLOAT = "float"
    E8M0 = "e8m0"
    E4M3 = "e4m3"

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the scale; ``None`` if several are allowed."""
        return _SCALE_DTYPES.get(self)


_SCALE_DTYPES = {
    ScaleFormat.E8M0: torch.float8_e8m0fnu,
    ScaleFormat.E4M3: torch.float8_e4m3fn,
}


def greatest(dtype: torch.dtype, element: Element) -> float:
    """Return the largest finite value of the format."""
    if element is not Element.WHOLE:
        return element.greatest
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def mantissa_bits(dtype: torch.dtype, element: Element) -> int:
    """Return the width of the mantissa; for an integer, that of its largest value."""
    if element is not Element.WHOLE:
        return element.mantissa_bits
    if dtype.is_floating_point:
        return -round(math.log2(torch.finfo(dtype).eps))
    return int(torch.iinfo(dtype).max).bit_length() - 1


def round_to_element(x: torch.Tensor, element: Element) -> torch.Tensor:
    """Round float32 values to the nearest element, ties to even; overflow saturates.

    NaN, which elements do not have, becomes 1.5 with its sign: the result for the bits of a quiet
    NaN in torchao's ``custom_fp_utils._f32_to_floatx_unpacked``, which this follows.
    """
    size = x.abs()
    field = size.view(torch.int32) >> _FIELD
    # Below the smallest normal number, subnormals keep the step of its exponent.
    field = field.clamp(min=_BIAS + element.least_exponent) - element.mantissa_bits
    step = (field << _FIELD).view(torch.float32)
    rounded = (torch.round(size / step) * step).clamp(max=element.greatest)
    # Not torch.where, whose scalar is traced as a separate tensor, nor masked_fill, whose result
    # is contiguous for any strides of x.
    return torch.copysign(torch.nan_to_num(rounded, nan=1.5), x)


def encode(values: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the code of every element, in the low bits of a uint8.

    Args:
        values: Elements, in any float dtype.
        element: Their format.
    """
    table = _magnitudes(element).to(values.device)
    x = values.to(torch.float32)
    sign = torch.signbit(x).to(torch.uint8) << (element.exponent_bits + element.mantissa_bits)
    # Elements are in the table, so their position is their code.
    return torch.searchsorted(table, x.abs().contiguous()).to(torch.uint8) | sign


def decode(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the elements that uint8 codes represent, in :data:`CONTAINER`."""
    table = _magnitudes(element)
    # The sign is the highest bit of a code, so the negative elements follow all others.
    table = torch.cat([table, -table]).to(codes.device)
    return table[codes.long()].to(CONTAINER)


def _magnitudes(element: Element) -> torch.Tensor:
    """Return the non-negative elements in the order of their codes."""
    m = element.mantissa_bits
    found = []
    for code in range(1 << (element.exponent_bits + m)):
        exponent, mantissa = code >> m, code & ((1 << m) - 1)
        # The leading 1 of a normal number is not stored; subnormals have none.
        whole = mantissa + ((1 << m) if exponent else 0)
        found.append(math.ldexp(whole, max(exponent, 1) - 1 + element.least_exponent - m))
    return torch.tensor(found, dtype=torch.float32)


def scale_divisor(scale: torch.Tensor, *, reciprocal: bool) -> torch.Tensor:
    """Return the divisor or multiplier of quantize for power-of-two scales.

    As in torchao's ``to_mx``, in float32. For division, the smallest scale counts as 2^-126 and NaN
    as infinity. For multiplication, which ``rceil`` uses, the smallest scale counts as 1.
    """
    codes = scale.view(torch.uint8)
    if not reciprocal:
        bits = codes.to(torch.int32) << _FIELD
        return bits.view(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    power = torch.exp2(_BIAS - codes.to(torch.float32))
    power = power.masked_fill(codes == 0, 1.0)
    return power.masked_fill(codes == _NAN_CODE, math.nan)
