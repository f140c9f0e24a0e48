"""Random networks of every family keep their values, strides and inputs through the whole pipeline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.support.captured_case import CapturedCase, assert_kept
from tests.support.strategies.sequences.cases import sequence_cases

pytestmark = [pytest.mark.property, pytest.mark.numeric]

DEFAULT = settings()
# With the convolutions of test_random_convolutions.py at least 500 networks, whatever the profile.
MORE = settings(max_examples=max(150, DEFAULT.max_examples))
REST = settings(max_examples=max(50, DEFAULT.max_examples))


@pytest.mark.own_kernels
@MORE
@given(case=sequence_cases())
def test_values_stay_within_rounding(case: CapturedCase) -> None:
    assert_kept(case, own=True)


@pytest.mark.thorough
@REST
@given(case=sequence_cases())
def test_without_own_kernels_values_stay_within_rounding(case: CapturedCase) -> None:
    assert_kept(case, own=False)
