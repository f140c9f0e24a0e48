"""Formats quantities with units: ``4.2 MB``, ``21 GB/s``, ``0.20 ms``."""

from __future__ import annotations

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _scaled(value: float, unit: str) -> str:
    for factor, prefix in _PREFIXES:
        if value >= factor:
            return f"{_digits(value / factor)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    """Format with two significant digits below 100, as an integer from there on."""
    if value >= 10 or value == 0:  # noqa: PLR2004 - two digits before the point
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def bytes_text(count: float) -> str:
    """Format an amount of memory."""
    return _scaled(count, "B")


def rate_text(per_second: float, unit: str = "B") -> str:
    """Format an amount per second."""
    return f"{_scaled(per_second, unit)}/s"


def operations_text(count: float) -> str:
    """Format a number of arithmetic operations."""
    return _scaled(count, "OP")


def seconds_text(seconds: float) -> str:
    """Format a duration, in milliseconds from 0.1 ms and in microseconds below."""
    if seconds >= 1e-4:  # noqa: PLR2004 - 0.1 ms
        milliseconds = seconds * 1e3
        return f"{milliseconds:.2f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"  # noqa: PLR2004
    return f"{_digits(seconds * 1e6)} us"
