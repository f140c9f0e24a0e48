"""Ranges of dtypes. 8-bit floats are storage types here, although torch counts them as floats."""

from __future__ import annotations

import math

import torch

COMPUTE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The float dtypes that models compute in."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Those of at most 32 bits."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The float dtypes of 8 bits, which are storage types."""

BYTES = (torch.int8, torch.uint8)
"""The integer dtypes of 8 bits."""


def widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a cast between two of ``COMPUTE_DTYPES`` is lossless; others are not supported."""
    known = {narrow, wide} <= {*COMPUTE_DTYPES}
    return known and torch.promote_types(narrow, wide) == wide


def bit_width(dtype: torch.dtype) -> int:
    """Return the bits of one element."""
    return dtype.itemsize * 8


def exact_integers(dtype: torch.dtype) -> tuple[int, int]:
    """Return the range in which ``dtype`` represents every integer."""
    if dtype is torch.bool:
        return 0, 1
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return info.min, info.max
    # `eps` is 2^(1 - digits), and 2^digits + 1 is the first integer that is rounded: 257 in
    # bfloat16, which has 8 digits.
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return -(2**digits), 2**digits
