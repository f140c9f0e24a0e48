"""Scale formulas of microscaling, bit for bit as in ``torchao.prototype.mx_formats``.

All functions take the maximum magnitude of every block in float32, NaN if the block contains one.
"""

from __future__ import annotations

import math

import torch

from qfuse.ir.quant.element import Element, greatest, mantissa_bits

_FIELD = 23  # bit position of the exponent in a float32
_BIAS = 127
_NAN = 255
_INFINITE = 254


def power_scale(
    peak: torch.Tensor, rounding: str, dtype: torch.dtype, element: Element
) -> torch.Tensor:
    """Return a power of two as ``float8_e8m0fnu``: ``to_mx``.

    Args:
        peak: Maximum magnitudes.
        rounding: ``floor`` (that of the OCP specification), ``ceil`` and ``even`` round the
            exponent of the peak; ``rceil`` rounds up that of its ratio to the largest element.
        dtype: Storage dtype of the elements.
        element: Their format.
    """
    top = greatest(dtype, element)
    if rounding == "rceil":
        codes = _ratio_codes(peak / top)
    else:
        codes = _exponent_codes(peak, rounding, top, mantissa_bits(dtype, element))
    return codes.view(torch.float8_e8m0fnu)


def _ratio_codes(ratio: torch.Tensor) -> torch.Tensor:
    # The codes 0 to 254 are powers of two; 255 is NaN.
    rounded = torch.clamp(torch.ceil(torch.log2(ratio)), min=-_BIAS, max=_BIAS) + _BIAS
    known = rounded.masked_fill(torch.isinf(ratio), _INFINITE)
    return known.masked_fill(torch.isnan(ratio), _NAN).to(torch.uint8)


def _exponent_codes(peak: torch.Tensor, rounding: str, top: float, mantissa: int) -> torch.Tensor:
    bits = peak.view(torch.int32)
    if rounding == "even":
        # Add half a step of the element's mantissa, which carries into the exponent.
        bits = bits + (1 << (_FIELD - mantissa - 1))
    exponent = ((bits >> _FIELD) & _NAN) - _BIAS
    if rounding == "ceil":
        exponent = exponent + ((bits & ((1 << _FIELD) - 1)) > 0)
    # `frexp` gives a mantissa below 1, so its exponent is one too large.
    of_top = math.frexp(top)[1] - 1
    codes = torch.clamp(exponent - of_top, min=-_BIAS, max=_BIAS + 1) + _BIAS
    return codes.masked_fill(torch.isnan(peak), _NAN).to(torch.uint8)


def block_scale(
    peak: torch.Tensor, top: float, least: float, outer_scale: torch.Tensor | None
) -> torch.Tensor:
    """Return a scale as ``float8_e4m3fn``: ``nvfp4_quantize``.

    Args:
        peak: Maximum magnitudes.
        top: The largest element.
        least: The minimum scale.
        outer_scale: The second-level scale that the result is relative to.
    """
    scale = peak / top
    if outer_scale is not None:
        scale = scale / outer_scale.to(torch.float32)
    most = torch.finfo(torch.float8_e4m3fn).max
    return torch.clamp(scale, min=least, max=most).to(torch.float8_e4m3fn)


def tensor_scale(peak: torch.Tensor, top: float) -> torch.Tensor:
    """Return the outer scale for which block scales use their full range.

    Follows torchao's ``per_tensor_amax_to_scale``.

    Args:
        peak: Maximum magnitude of the tensor.
        top: The largest element.
    """
    return peak / (torch.finfo(torch.float8_e4m3fn).max * top)
