"""How many products of 8-bit integers an int32 sum holds."""

from __future__ import annotations

MOST_PRODUCTS = 1 << 16
"""With a zero point of the left operand only: 255 * 128 * 2^16 is below 2^31."""

MOST_PRODUCTS_WITH_ZERO = 1 << 15
"""With zero points of both operands: 255 * 255 * 2^15 is below 2^31."""
