"""The number formats of microscaling: elements of less than 8 bits, and the formats of scales.

Elements of 4 and 6 bits are stored as their values in ``float8_e4m3fn``, which holds all of them
(also -0.0), one per byte. So whatever multiplies stored numbers by a scale is right about them
without knowing the format; only quantize, which rounds to it, asks. Codes are a layout:
:func:`encode` and :func:`decode` go from values to codes and back.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch

CONTAINER = torch.float8_e4m3fn
"""The storage type of elements of less than 8 bits."""

_FIELD = 23  # where the exponent begins in the bits of a float32
_BIAS = 127
_NAN_CODE = 255


class Element(StrEnum):
    """What the stored numbers are, if they are fewer than the storage type has.

    The names of the others are those of the Open Compute Project: sign, exponent, mantissa. They
    have subnormals and a negative zero, neither infinities nor NaN.
    """

    WHOLE = ""
    E2M1 = "float4_e2m1"
    E2M3 = "float6_e2m3"
    E3M2 = "float6_e3m2"

    @property
    def exponent_bits(self) -> int:
        """Width of the exponent."""
        return int(self.value[-3])

    @property
    def mantissa_bits(self) -> int:
        """Width of the mantissa."""
        return int(self.value[-1])

    @property
    def least_exponent(self) -> int:
        """Exponent of the least normal number, and of the subnormal ones."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def greatest(self) -> float:
        """The greatest number: 6.0, 7.5 and 28.0."""
        top = self.least_exponent + (1 << self.exponent_bits) - 2
        return math.ldexp(2 - math.ldexp(1, -self.mantissa_bits), top)


class ScaleFormat(StrEnum):
    """How block scales are stored.

    ``FLOAT``: in a type that torch computes in. ``E8M0``: a power of two, 2^-127 to 2^127, or NaN.
    ``E4M3``: ``float8_e4m3fn``.
    """

    FLOAT = "float"
    E8M0 = "e8m0"
    E4M3 = "e4m3"

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of the scale; ``None`` if it may be several."""
        return _SCALE_DTYPES.get(self)


_SCALE_DTYPES = {
    ScaleFormat.E8M0: torch.float8_e8m0fnu,
    ScaleFormat.E4M3: torch.float8_e4m3fn,
}


def greatest(dtype: torch.dtype, element: Element) -> float:
    """Return the greatest finite number that can be stored."""
    if element is not Element.WHOLE:
        return element.greatest
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def mantissa_bits(dtype: torch.dtype, element: Element) -> int:
    """Return the width of the mantissa; of an integer, that of its greatest number."""
    if element is not Element.WHOLE:
        return element.mantissa_bits
    if dtype.is_floating_point:
        return -round(math.log2(torch.finfo(dtype).eps))
    return int(torch.iinfo(dtype).max).bit_length() - 1


def round_to_element(x: torch.Tensor, element: Element) -> torch.Tensor:
    """Round float32 numbers to the nearest element, ties to even; what is too large saturates.

    NaN, which elements do not have, becomes 1.5 with its sign: what the bits of a quiet NaN give
    in torchao's ``custom_fp_utils._f32_to_floatx_unpacked``, which this follows.
    """
    size = x.abs()
    field = size.view(torch.int32) >> _FIELD
    field = field.clamp(min=_BIAS + element.least_exponent) - element.mantissa_bits
    step = (field << _FIELD).view(torch.float32)
    rounded = (torch.round(size / step) * step).clamp(max=element.greatest)
    # Neither torch.where, whose number tracing takes for a tensor of its own, nor masked_fill,
    # whose result is contiguous whatever the strides of x are.
    return torch.copysign(torch.nan_to_num(rounded, nan=1.5), x)


def encode(values: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the code of every element, in the low bits of a uint8.

    Args:
        values: Elements, in any float type.
        element: Their format.
    """
    table = _magnitudes(element).to(values.device)
    x = values.to(torch.float32)
    sign = torch.signbit(x).to(torch.uint8) << (element.exponent_bits + element.mantissa_bits)
    return torch.searchsorted(table, x.abs().contiguous()).to(torch.uint8) | sign


def decode(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the elements that uint8 codes stand for, in :data:`CONTAINER`."""
    table = _magnitudes(element)
    table = torch.cat([table, -table]).to(codes.device)
    return table[codes.long()].to(CONTAINER)


def _magnitudes(element: Element) -> torch.Tensor:
    """Return the numbers that are not negative, in the order of their codes."""
    m = element.mantissa_bits
    found = []
    for code in range(1 << (element.exponent_bits + m)):
        exponent, mantissa = code >> m, code & ((1 << m) - 1)
        whole = mantissa + ((1 << m) if exponent else 0)
        found.append(math.ldexp(whole, max(exponent, 1) - 1 + element.least_exponent - m))
    return torch.tensor(found, dtype=torch.float32)


def scale_divisor(scale: torch.Tensor, *, reciprocal: bool) -> torch.Tensor:
    """Return what real numbers are divided by, or multiplied by, for scales that are powers of two.

    As torchao's ``to_mx`` does it, in float32. Dividing, the least scale counts as 2^-126 and NaN
    as infinity. Multiplying, which is what ``rceil`` does, the least scale counts as 1.
    """
    codes = scale.view(torch.uint8)
    if not reciprocal:
        bits = codes.to(torch.int32) << _FIELD
        return bits.view(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    power = torch.exp2(_BIAS - codes.to(torch.float32))
    power = power.masked_fill(codes == 0, 1.0)
    return power.masked_fill(codes == _NAN_CODE, math.nan)
