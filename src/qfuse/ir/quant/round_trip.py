"""When quantize(dequantize(q)) returns ``q``.

With ``d`` the quantized value minus the zero point, ``d * s * (1 / s)`` is within four roundings of
``d``. For ``|d| < 2^17`` in float32 that is less than 1/32, so rounding to the nearest returns
``d``, and adding the zero point is exact.
"""

from __future__ import annotations

from enum import StrEnum

import torch

# A 16-bit quantized value and such a zero point are less than 2^17 apart.
_STORED_BYTES = 2
_ZERO_POINTS = 1 << 16


class RoundTripFailure(StrEnum):
    """Why a round trip may change quantized values."""

    STORAGE = "the quantized values are not integers of at most 16 bits"
    ZERO_POINT = "a zero point is not a small integer"
    SCALE = "a scale leaves the normal range of float32 in a product"


def round_trip_failure(
    storage: torch.dtype, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> RoundTripFailure | None:
    """Return why ``quantize(dequantize(q, s), s)`` may differ from ``q``; ``None`` if it cannot.

    Valid for arithmetic in float32 or wider, and for values within the quantization range, since
    others are clamped.

    Args:
        storage: The dtype of the quantized values.
        scale: Any shape, finite or not. The sign does not matter.
        zero_point: Any shape, or ``None`` for zeros.
    """
    if not _is_small(storage):
        return RoundTripFailure.STORAGE
    if zero_point is not None and not _are_small(zero_point):
        return RoundTripFailure.ZERO_POINT
    return None if _stay_normal(scale) else RoundTripFailure.SCALE


def _is_small(storage: torch.dtype) -> bool:
    real = storage.is_floating_point or storage.is_complex
    return not real and storage is not torch.bool and storage.itemsize <= _STORED_BYTES


def _are_small(zero_point: torch.Tensor) -> bool:
    wide = zero_point.double()
    return bool(((wide == wide.round()) & (wide.abs() <= _ZERO_POINTS)).all())


def _stay_normal(scale: torch.Tensor) -> bool:
    """Whether the scale, its reciprocal and every product are normal float32 numbers."""
    size, facts = scale.float().abs(), torch.finfo(torch.float32)
    # The difference is below 2^17, so every product stays finite.
    most = facts.max / (2 * _ZERO_POINTS)
    # A subnormal scale or reciprocal has fewer than 24 bits, and the bound on the roundings fails.
    return bool(((size >= facts.tiny) & (size <= most) & (1 / size >= facts.tiny)).all())
