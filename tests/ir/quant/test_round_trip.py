"""Where the law says that quantized values come back, every one does; where it refuses, some do not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qfuse.ir.quant.round_trip import RoundTripFailure, round_trip_failure

EDGE = 1 << 16
TINY = torch.finfo(torch.float32).tiny
MOST = torch.finfo(torch.float32).max / (2 * EDGE)
STORAGE = (torch.int8, torch.uint8, torch.int16, torch.uint16)


def lost(storage: torch.dtype, scale: float, zero: int) -> int:
    """Count the quantized values that do not come back, as PT2E's reference computes them."""
    facts = torch.iinfo(storage)
    q = torch.arange(facts.min, facts.max + 1)
    real = (q.to(torch.float32) - zero) * scale
    again = torch.clamp(torch.round(real * (1 / scale)) + zero, facts.min, facts.max)
    return int((again != q).sum())


def said(storage: torch.dtype, scale: float, zero: float) -> RoundTripFailure | None:
    numbers = torch.tensor(scale, dtype=torch.float64), torch.tensor(zero, dtype=torch.float64)
    return round_trip_failure(storage, *numbers)


@given(
    st.sampled_from(STORAGE),
    st.one_of(st.floats(TINY, MOST), st.sampled_from([TINY, MOST, 0.1, 1 / 3, 1e-37, 2**-20])),
    st.one_of(st.integers(-EDGE, EDGE), st.sampled_from([-EDGE, EDGE])),
)
def test_what_the_law_allows_comes_back(storage: torch.dtype, scale: float, zero: int) -> None:
    assert said(storage, scale, zero) is None
    assert said(storage, -scale, zero) is None
    assert lost(storage, scale, zero) == 0


@pytest.mark.parametrize(
    ("scale", "zero", "wrong"),
    [
        (0.1, 2**30, RoundTripFailure.ZERO_POINT),
        (1e37, 0, RoundTripFailure.SCALE),
        (1e-42, 0, RoundTripFailure.SCALE),
    ],
)
def test_what_it_refuses_is_lost(scale: float, zero: int, wrong: RoundTripFailure) -> None:
    assert said(torch.int8, scale, zero) is wrong
    assert lost(torch.int8, scale, zero) > 0


@pytest.mark.parametrize("scale", [0.0, math.inf, -math.inf, math.nan, 2.0**127])
def test_scales_that_are_no_numbers_to_divide_by(scale: float) -> None:
    assert said(torch.int8, scale, 0) is RoundTripFailure.SCALE


@pytest.mark.parametrize("zero", [0.5, EDGE + 1, -EDGE - 1, math.nan, math.inf])
def test_zero_points_that_are_no_small_integers(zero: float) -> None:
    assert said(torch.int8, 0.1, zero) is RoundTripFailure.ZERO_POINT


@pytest.mark.parametrize("storage", [torch.int32, torch.float8_e4m3fn, torch.bfloat16, torch.bool])
def test_storage_that_is_no_small_integer(storage: torch.dtype) -> None:
    assert said(storage, 0.1, 0) is RoundTripFailure.STORAGE


def test_one_of_many_is_enough() -> None:
    scale, zero = torch.tensor([0.1, 1e38]), torch.tensor([0, 1])
    assert round_trip_failure(torch.int8, scale, None) is RoundTripFailure.SCALE
    assert round_trip_failure(torch.int8, scale[:1], None) is None
    assert round_trip_failure(torch.int8, scale[:1], zero * EDGE * 2) is RoundTripFailure.ZERO_POINT
