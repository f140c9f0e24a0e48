"""The longest part of a sequence that repeats itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfuse.backends.blocks.period import Run, periodic_runs


def test_the_run_with_the_widest_coverage_is_first() -> None:
    runs = periodic_runs("aaaa" + "bcd" * 4, 3)

    assert runs == [Run(3, 4, 16), Run(1, 0, 4)]


def test_a_run_may_end_within_a_period() -> None:
    (run,) = periodic_runs("xabcabcabcaby", 3)

    assert run == Run(3, 1, 12)
    assert (run.times, run.covered) == (3, 9)


def test_of_two_periods_with_the_same_coverage_the_shorter_one_is_first() -> None:
    runs = periodic_runs("abc" * 6, 3)

    assert [run.period for run in runs] == [3, 6]


@pytest.mark.parametrize("tokens", ["", "a", "abcd", "abab"])
def test_what_does_not_repeat_often_enough_is_not_found(tokens: str) -> None:
    assert periodic_runs(tokens, 3) == []


@pytest.mark.property
@given(st.lists(st.integers(0, 3), max_size=40))
def test_every_run_repeats_itself(tokens: list[int]) -> None:
    for run in periodic_runs(tokens, 2):
        part = tokens[run.begin : run.end]
        assert run.times >= 2
        assert part[run.period :] == part[: -run.period]


@pytest.mark.property
@given(
    before=st.lists(st.integers(10, 20), max_size=9, unique=True),
    block=st.lists(st.integers(50, 54), min_size=1, max_size=9),
    times=st.integers(3, 7),
    after=st.lists(st.integers(30, 40), max_size=9, unique=True),
)
def test_a_block_with_a_mark_is_found(
    before: list[int], block: list[int], times: int, after: list[int]
) -> None:
    block = [*block, 99]
    runs = periodic_runs([*before, *block * times, *after], 3)

    begin = len(before)
    assert any(
        run.period == len(block) and run.begin <= begin and run.end >= begin + times * len(block)
        for run in runs
    )
