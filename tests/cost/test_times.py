"""Measured times on disk: kept for one machine and version, and never trusted when damaged."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from qfuse.cost.times import Times, load_times, read_times, save_times, times_path
from qfuse.ir.errors import CacheError
from qfuse.targets import Target

TARGET = Target.for_testing()
ONE = {"linear(a)": {"qfuse.linear_w8a8": 1e-4, "float": 2e-4}}
TWO = {"linear(b)": {"float": 3e-4}}


def test_times_are_added_to_the_stored_ones(tmp_path: Path) -> None:
    assert load_times(TARGET, "k", tmp_path).known == {}
    save_times(Times(dict(ONE)), TARGET, "k", tmp_path)
    save_times(Times(dict(TWO)), TARGET, "k", tmp_path)
    assert load_times(TARGET, "k", tmp_path).known == {**ONE, **TWO}


def test_other_kernels_and_machines_have_their_own(tmp_path: Path) -> None:
    save_times(Times(dict(ONE)), TARGET, "k", tmp_path)
    assert load_times(TARGET, "other", tmp_path).known == {}
    assert load_times(replace(TARGET, threads=TARGET.threads + 1), "k", tmp_path).known == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2, "key": {}, "times": {}}'])
def test_damaged_times_are_not_used(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = times_path(TARGET, "k", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_times(TARGET, "k", tmp_path).known == {}
    assert str(path) in caplog.text


@pytest.mark.parametrize("value", [0, -1.0, True, "1", float("inf"), float("nan")])
def test_times_are_positive_numbers(value: object) -> None:
    with pytest.raises(CacheError, match="are not positive numbers"):
        read_times({"linear(a)": {"float": value}})


def test_what_was_asked_for_is_known() -> None:
    times = Times({**ONE, **TWO})
    assert times.of("linear(c)") == {}
    assert times.of("linear(a)") == ONE["linear(a)"]
    assert times.used == ONE
