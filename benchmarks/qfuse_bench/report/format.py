"""Formatting of figures, for the terminal and the pages."""

from __future__ import annotations

import math

from qfuse_bench.harness.comparison import Entry, Verdict
from qfuse_bench.harness.stats import Ratio

DISTURBED = 0.1
"""If other programs used a greater part of the cores, the figures are to be read with care."""

_NOTHING = "-"


def milliseconds(seconds: float) -> str:
    """Return milliseconds with three significant digits."""
    return _three_digits(seconds * 1e3)


def microseconds(seconds: float) -> str:
    """Return microseconds with three significant digits."""
    return _three_digits(seconds * 1e6)


def _three_digits(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{digits}f}"


def time(entry: Entry) -> str:
    """Return the median, and in parentheses the tenth percentile of single calls, in ms.

    Invalid times are not shown.
    """
    if entry.verdict is Verdict.FAILED:
        return "failed"
    if entry.verdict is Verdict.WRONG:
        return f"WRONG ({decibels(entry.sqnr)} dB)"
    if entry.series is None:
        return _NOTHING
    return f"{milliseconds(entry.series.median)} ({milliseconds(entry.series.p10)})"


def ratio(value: Ratio | None) -> str:
    """Return a ratio with its 95 % interval."""
    return _NOTHING if value is None else f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def decibels(value: float | None) -> str:
    """Return a rounded SQNR."""
    if value is None:
        return _NOTHING
    return f"{value:.0f}" if math.isfinite(value) else ("exact" if value > 0 else "none")


def megabytes(value: int | None) -> str:
    """Return bytes as MB."""
    return _NOTHING if value is None else f"{value / 1e6:.0f}"


def memory(entry: Entry) -> str:
    """Return resident memory after the rounds, and their peak in parentheses, in MB."""
    if entry.memory is None:
        return _NOTHING
    return f"{megabytes(entry.memory.resident)} ({megabytes(entry.memory.peak)})"
