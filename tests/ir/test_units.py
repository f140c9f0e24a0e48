"""Numbers as people read them."""

from __future__ import annotations

import pytest

from qfuse.ir.units import bytes_text, operations_text, rate_text, seconds_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (0.5, "0.5 B"),
        (7, "7.0 B"),
        (4.2e6, "4.2 MB"),
        (999e9, "999 GB"),
        (3e13, "30 TB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_rates_and_operations() -> None:
    assert rate_text(21e9) == "21 GB/s"
    assert rate_text(1.24e12, "OP") == "1.2 TOP/s"
    assert operations_text(17.2e9) == "17 GOP"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (9e-7, "0.9 us"),
        (2e-6, "2.0 us"),
        (9.9e-5, "99 us"),
        (2e-4, "0.20 ms"),
        (0.00999, "9.99 ms"),
        (0.0145, "14 ms"),
        (2.5, "2500 ms"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
