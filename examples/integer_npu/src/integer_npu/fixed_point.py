"""Fixed-point arithmetic: a positive or negative factor as an int32 multiplier and a shift.

``value * factor`` is ``value * multiplier / 2**shift``, rounded half away from zero, with a 64-bit
product, as in gemmlowp and TensorFlow Lite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

INT32 = np.iinfo(np.int32)
# A product has at most 62 bits, so that the rounding term can be added in 64.
_MOST_SHIFT = 62


def fixed_point(factors: Iterable[float]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return multipliers and shifts, or ``None`` if a factor is too large or not finite.

    Multipliers have 31 bits; a factor too small for any shift becomes zero.
    """
    pairs = [_pair(factor) for factor in factors]
    known = [pair for pair in pairs if pair is not None]
    if len(known) < len(pairs):
        return None
    multipliers, shifts = zip(*known, strict=True) if known else ((), ())
    return np.array(multipliers, np.int64), np.array(shifts, np.int64)


def _pair(factor: float) -> tuple[int, int] | None:
    if not math.isfinite(factor):
        return None
    fraction, exponent = math.frexp(factor)
    multiplier, shift = round(fraction * 2**31), 31 - exponent
    if abs(multiplier) == 2**31:
        multiplier, shift = multiplier // 2, shift - 1
    if shift > _MOST_SHIFT:
        return 0, 1
    return (multiplier, shift) if shift >= 1 else None


def rescale(
    values: NDArray[np.int64], multiplier: NDArray[np.int64], shift: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return ``values * multiplier / 2**shift`` as int32, saturated.

    Args:
        values: Integers of 32 bits, in any shape.
        multiplier: Broadcastable to the values.
        shift: The same.
    """
    product = values * multiplier
    # The shift rounds down, so that a negative half has to be moved away from zero first.
    rounded = (product + (np.int64(1) << (shift - 1)) - (product < 0)) >> shift
    clipped: NDArray[np.int64] = np.clip(rounded, INT32.min, INT32.max)
    return clipped
